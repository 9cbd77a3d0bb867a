"""Real trainings with the real Megatron-Core and gloo, at toy size: bits, resuming, failures."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.proof.verify_log import verify_logs
from tests.megatron.in_ranks import Finished, asked, losses, pretrained

LINE = re.compile(r" iteration +(\d+)/ +6 .* lm loss: \S+ . grad norm: [\d.]+ . tokens/s: \d+ ")
long = pytest.mark.long
REPLICAS = "--tensor-model-parallel-size 1 --data-parallel-size 2 --use-distributed-optimizer"
BUCKETS = f"{REPLICAS} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
ULYSSES = "--tensor-model-parallel-size 1 --context-parallel-size 2 --commfuse-ulysses"
OVERLAP = "--train-iters 4 --commfuse-fb-overlap"


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Folder and result of six iterations on two tensor-parallel ranks."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    return runs / "llama_tiny", pretrained(ranks(2), runs)


def test_what_a_run_prints_and_leaves(uninterrupted: tuple[Path, Finished]) -> None:
    folder, done = uninterrupted
    assert done.out.splitlines()[-1] == (
        f"written: {folder}/metrics.jsonl, {folder}/loss.png, {folder}/checkpoints"
    )
    lines = [LINE.match(line) for line in done.out.splitlines() if line.startswith(" iteration")]
    assert [int(line.group(1)) for line in lines if line] == [1, 2, 3, 4, 5, 6]
    assert losses(folder)[-1] < losses(folder)[0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    files = {str(path.relative_to(folder)) for path in folder.glob("checkpoints/*/*")}
    assert files == {f"checkpoints/iter_000000{i}/rank_{r}.pt" for i in (3, 6) for r in (0, 1)}


def test_resume_after_a_kill_equals_the_uninterrupted_run(
    ranks, uninterrupted: tuple[Path, Finished], tmp_path: Path
) -> None:
    """As if killed while writing the checkpoint of iteration 6, metrics line half written."""
    folder, whole = uninterrupted
    killed = tmp_path / "llama_tiny"
    shutil.copytree(folder, killed)
    checkpoints = killed / "checkpoints"
    (checkpoints / "iter_0000006").rename(checkpoints / ".iter_0000006.partial")
    (checkpoints / ".iter_0000006.partial/rank_1.pt").write_bytes(b"cut off")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "lm_')
    done = pretrained(ranks(2), tmp_path, "--resume")
    assert f"resuming from {checkpoints}/iter_0000003" in done.out
    assert " iteration        3/" not in done.out
    assert done.weights == whole.weights
    assert losses(killed) == losses(folder)
    assert not list(checkpoints.glob(".*"))
    # A new run of that name keeps the existing folder.
    pretrained(ranks(2), tmp_path, "--train-iters", "1")
    assert losses(tmp_path / "llama_tiny.1") == losses(folder)


@pytest.mark.parametrize(
    "options",
    [
        f"{REPLICAS} --bf16 --recompute",
        f"{ULYSSES}",
        pytest.param(f"{BUCKETS} --commfuse-dp", marks=long),
        pytest.param(f"{REPLICAS} --commfuse-dp", marks=long),
    ],
)
def test_each_rank_finds_its_own_state(ranks, tmp_path: Path, options: str) -> None:
    whole = pretrained(ranks(2), tmp_path, *options.split())
    curve = losses(tmp_path / "llama_tiny")
    assert curve[-1] < curve[0]
    shutil.rmtree(tmp_path / "llama_tiny/checkpoints/iter_0000006")
    resumed = pretrained(ranks(2), tmp_path, *options.split(), "--resume")
    assert resumed.weights == whole.weights
    assert losses(tmp_path / "llama_tiny") == curve


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 1",
        "--tensor-model-parallel-size 1 --data-parallel-size 2",
        ULYSSES,
    ],
)
def test_layouts_agree(
    ranks, uninterrupted: tuple[Path, Finished], tmp_path: Path, layout: str
) -> None:
    pretrained(ranks(2 if " 2" in layout else 1), tmp_path, *layout.split())
    expected, actual = losses(uninterrupted[0]), losses(tmp_path / "llama_tiny")
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ("", ["qkv", "proj", "fc1", "fc2", "output"]),
        pytest.param("--bf16", ["qkv", "proj", "fc1", "fc2", "output"], marks=long),
        (ULYSSES, ["ulysses", "qkv", "proj"]),
        pytest.param(f"{BUCKETS} --bf16 --commfuse-dp", ["gradients", "parameters"], marks=long),
        ("--commfuse-fb-overlap --no-use-commfuse", []),
        ("--commfuse-fb-overlap --recompute --no-gradient-accumulation-fusion", ["qkv"]),
    ],
)
def test_compared_forms_have_the_same_bits(
    ranks, tmp_path: Path, options: str, fused: list[str]
) -> None:
    words = ("--compare", "--train-iters", "3", *options.split())
    printed = pretrained(ranks(2), tmp_path, *words).out
    assert printed.splitlines()[-1] == "identical: True"
    hashes = dict(re.findall(r"sha256 of all weights, (\w+): (\w{64})", printed))
    assert ("plain" in hashes) == ("--no-use-commfuse" not in options)
    assert hashes.get("plain") == hashes.get("commfuse")
    # Without this the comparison could pass because nothing was fused.
    for layer in fused:
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* (forward calls|buckets) fused", printed)
    assert f"{tmp_path}/llama_tiny/compare/timelines.png was not drawn: no iteration" in printed
    assert ("overlap" in hashes) == ("--commfuse-fb-overlap" in options)
    if "overlap" in hashes:
        assert hashes["overlap"] == hashes["megatron"]
        assert "3 of 4 forwards of stage 0 run beside a backward" in printed


def test_fused_layers_beside_another_micro_batch_have_the_same_bits(ranks, tmp_path: Path) -> None:
    ends = [
        pretrained(ranks(2), tmp_path, *OVERLAP.split(), *form, "--name", name)
        for name, form in (("one", ()), ("other", ("--plain",)))
    ]
    assert ends[0].weights == ends[1].weights
    assert losses(tmp_path / "one") == losses(tmp_path / "other")
    assert re.search(
        r"  qkv: 8 forward calls fused\n(.*\n)*.* 24 forward calls by Megatron, because forward",
        ends[0].out,
    )
    assert "fused\n" not in ends[1].out


def signalled(rank: int, method: str, args: Any) -> tuple[Any, str]:
    """Only the last rank gets a signal, in the second iteration."""
    from scripts.cpu_pretraining import training

    begin = training.Training._iteration

    def iteration(loop: Any, stop: Any) -> Any:
        if loop.iteration == 1 and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(loop, stop)

    with mock.patch.object(training.Training, "_iteration", iteration):
        return asked(rank, method, args)


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(ranks, tmp_path: Path) -> None:
    stopped = pretrained(ranks(2), tmp_path, "--save-interval", "0", code=143, work=signalled)
    assert "stopped by signal 15 after iteration 2; give the same" in stopped.out
    done = pretrained(ranks(2), tmp_path, "--resume", "--train-iters", "4")
    assert len(losses(tmp_path / "llama_tiny")) == 4
    assert "note: train_iters differs from the checkpoint's (6, now 4): losses will" in done.out
    half = pretrained(ranks(2), tmp_path, "--compare", code=143, work=signalled)
    assert "a comparison cannot be resumed" in half.out
    assert "identical" not in half.out


def test_a_full_disk_leaves_the_checkpoint_before(ranks, small_disk: Callable[[int], Path]) -> None:
    """The disk has room for one and a half checkpoints."""
    runs = small_disk(540)
    options = ("--tensor-model-parallel-size", "1", "--hidden-size", "16")
    done = pretrained(ranks(1), runs, *options, code=1)
    assert re.search("could not write .* No space left .*the previous one is untouched", done.err,
                     re.S)  # fmt: skip
    checkpoints = runs / "llama_tiny/checkpoints"
    assert [path.name for path in checkpoints.glob("iter*")] == ["iter_0000003"]
    shutil.rmtree(checkpoints / ".iter_0000006.partial")
    resumed = pretrained(ranks(1), runs, *options, "--resume", code=1)
    assert " iteration        6/" in resumed.out


def test_a_training_that_diverges_says_so(ranks, tmp_path: Path) -> None:
    options = ("--tensor-model-parallel-size", "1", "--lr", "1e9")
    done = pretrained(ranks(1), tmp_path, *options, code=1)
    assert re.search(
        r"error: iteration \d: .* is (nan|inf); .* Lower --lr \(now 1000000000\.0\)", done.err
    )


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
