"""Real trainings with the real Megatron-Core and gloo, at toy size: bits and failures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.proof.verify_log import verify_logs
from tests.megatron.in_ranks import pretrained

LINE = re.compile(r" iteration +(\d+)/ +6 .* lm loss: \S+ . grad norm: [\d.]+ . tokens/s: \d+ ")
long = pytest.mark.long
REPLICAS = "--tensor-model-parallel-size 1 --data-parallel-size 2 --use-distributed-optimizer"
ULYSSES = "--tensor-model-parallel-size 1 --context-parallel-size 2 --commfuse-ulysses"
OVERLAP = "--train-iters 4 --commfuse-fb-overlap"


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\| lm loss: (\S+) \|", printed)]


def weights(printed: str) -> str:
    return re.findall(r"^sha256 of all weights: (\w{64})$", printed, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def tensor_parallel(ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What six iterations on two tensor-parallel ranks print; they leave no file."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    printed = pretrained(ranks(2), folder)
    assert not list(folder.iterdir())
    return printed


def test_what_a_run_prints(tensor_parallel: str) -> None:
    printed = tensor_parallel.splitlines()
    assert printed[-1] == f"sha256 of all weights: {weights(tensor_parallel)}"
    lines = [LINE.match(line) for line in printed if line.startswith(" iteration")]
    assert [int(line.group(1)) for line in lines if line] == [1, 2, 3, 4, 5, 6]
    assert losses(tensor_parallel)[-1] < losses(tensor_parallel)[0]


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 1",
        "--tensor-model-parallel-size 1 --data-parallel-size 2",
        f"{REPLICAS} --recompute",
        ULYSSES,
    ],
)
def test_layouts_agree(ranks, tensor_parallel: str, tmp_path: Path, layout: str) -> None:
    printed = pretrained(ranks(2 if " 2" in layout else 1), tmp_path, *layout.split())
    expected, actual = losses(tensor_parallel), losses(printed)
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ("", ["qkv", "proj", "fc1", "fc2", "output"]),
        pytest.param("--bf16", ["qkv", "proj", "fc1", "fc2", "output"], marks=long),
        (ULYSSES, ["ulysses", "qkv", "proj"]),
        pytest.param(f"{REPLICAS} --bf16 --commfuse-dp", ["gradients", "parameters"], marks=long),
        ("--commfuse-fb-overlap --no-use-commfuse", []),
        ("--commfuse-fb-overlap --recompute --no-gradient-accumulation-fusion", ["qkv"]),
    ],
)
def test_compared_forms_have_the_same_bits(
    ranks, tmp_path: Path, options: str, fused: list[str]
) -> None:
    words = ("--compare", "--train-iters", "3", *options.split())
    printed = pretrained(ranks(2), tmp_path, *words)
    assert printed.splitlines()[-1] == "identical: True"
    hashes = dict(re.findall(r"sha256 of all weights, (\w+): (\w{64})", printed))
    assert ("plain" in hashes) == ("--no-use-commfuse" not in options)
    assert hashes.get("plain") == hashes.get("commfuse")
    # Without this the comparison could pass because nothing was fused.
    for layer in fused:
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* (forward calls|buckets) fused", printed)
    assert f"{tmp_path}/timelines.png was not drawn: no iteration" in printed
    assert ("overlap" in hashes) == ("--commfuse-fb-overlap" in options)
    if "overlap" in hashes:
        assert hashes["overlap"] == hashes["megatron"]
        assert "3 of 4 forwards of stage 0 run beside a backward" in printed


def test_fused_layers_beside_another_micro_batch_have_the_same_bits(ranks, tmp_path: Path) -> None:
    ends = [pretrained(ranks(2), tmp_path, *OVERLAP.split(), *form) for form in ((), ("--plain",))]
    assert weights(ends[0]) == weights(ends[1])
    assert losses(ends[0]) == losses(ends[1])
    assert re.search(
        r"  qkv: 8 forward calls fused\n(.*\n)*.* 24 forward calls by Megatron, because forward",
        ends[0],
    )
    assert "fused\n" not in ends[1]


def test_a_training_that_diverges_says_so(ranks, tmp_path: Path) -> None:
    options = ("--tensor-model-parallel-size", "1", "--lr", "1e9")
    printed = pretrained(ranks(1), tmp_path, *options, code=1)
    assert re.search(r"error: iteration \d: .* is (nan|inf); lower --lr \(now 1000000000", printed)


@pytest.mark.parametrize(
    ("options", "operations"),
    # With overlap: two ranks, four iterations of three pairs, 28 collectives per pair.
    [
        ("--commfuse-chunks 2", range(100, 10_000)),
        (f"{OVERLAP} --no-use-commfuse", [2 * 4 * 3 * 28]),
    ],
)
def test_the_order_of_transfers_is_recorded_and_proved(
    ranks, tmp_path: Path, options: str, operations: Any
) -> None:
    log = tmp_path / "order log"
    words = ("--train-iters", "3", *options.split())
    pretrained(ranks(2), tmp_path, *words, "--commfuse-order-log", str(log))
    proof = verify_logs([log])
    assert (proof.faults, proof.notes, proof.ranks) == ([], [], 2)
    assert proof.operations in operations
