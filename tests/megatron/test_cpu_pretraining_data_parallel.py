"""Trainings with replicas: buckets by our transfers and by the collective, to the same bits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.in_ranks import TINY, losses, pretrained

REPLICAS = (
    "--train-iters 5 --eval-interval 0 --tensor-model-parallel-size 1 --data-parallel-size 2 "
    "--use-distributed-optimizer"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"


@pytest.mark.long
def test_replicas_repeated_and_resumed(ranks, tmp_path: Path) -> None:
    found, curves = {}, {}
    for name, options in (("plain", ""), ("overlap", OVERLAP)):
        for form in ("--commfuse-dp", "--no-commfuse-dp"):
            run = f"{name}{form}"
            words = [*REPLICAS.split(), *options.split(), form, "--name", run]
            found[run] = pretrained(ranks(2), tmp_path, *words)
            curves[run] = losses(tmp_path / run)
    for name in ("plain", "overlap"):
        assert curves[f"{name}--commfuse-dp"] == curves[f"{name}--no-commfuse-dp"]
        assert found[f"{name}--commfuse-dp"].weights == found[f"{name}--no-commfuse-dp"].weights
    # Buckets make other shards, over which the gradient norm is summed: other rounding.
    plain, overlapped = curves["plain--commfuse-dp"], curves["overlap--commfuse-dp"]
    assert plain == pytest.approx(overlapped)
    assert plain[-1] < plain[0]

    assert "  gradients: 5 buckets fused" in found["plain--commfuse-dp"].out
    assert "  parameters: 5 buckets fused" in found["plain--commfuse-dp"].out
    buckets = re.findall(r"gradients: (\d+) buckets fused", found["overlap--commfuse-dp"].out)
    assert int(buckets[0]) >= 5 * 4
    assert "gradients" not in found["plain--no-commfuse-dp"].out

    name = "overlap--commfuse-dp"
    shutil.rmtree(tmp_path / name / "checkpoints/iter_0000005")
    words = [*REPLICAS.split(), *OVERLAP.split(), "--commfuse-dp", "--name", name, "--resume"]
    assert pretrained(ranks(2), tmp_path, *words).weights == found[name].weights
    assert losses(tmp_path / name) == overlapped


@pytest.mark.long
def test_with_tensor_parallelism(ranks, tmp_path: Path) -> None:
    """Two replicas of two halves each, whose linear layers are fused as well."""
    options = f"{REPLICAS} {OVERLAP} --bf16 --tensor-model-parallel-size 2 --train-iters 3"
    fused, collective = (
        pretrained(ranks(4), tmp_path, *options.split(), form, "--name", form.strip("-"))
        for form in ("--commfuse-dp", "--no-commfuse-dp")
    )
    assert fused.weights == collective.weights
    assert losses(tmp_path / "commfuse-dp") == losses(tmp_path / "no-commfuse-dp")
    for name in ("gradients", "parameters", "qkv", "output"):
        assert re.search(f"  {name}: .* fused$", fused.out, re.MULTILINE)


@pytest.mark.long
def test_compare(ranks, tmp_path: Path) -> None:
    options = f"{REPLICAS} {OVERLAP} --bf16 --train-iters 2 --commfuse-dp --compare"
    printed = pretrained(ranks(2), tmp_path, *options.split()).out
    assert printed.splitlines()[-1] == "identical: True"
    # Nothing but the buckets is fused, so that Megatron's own run ends with the same bits, too.
    assert "largest loss difference 0, weights equal bit for bit" in printed
    assert re.search(r"commfuse: +gradients: [1-9]\d* buckets fused", printed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--commfuse-dp --no-use-distributed-optimizer",
            r"--commfuse-dp needs --use-distributed-optimizer: .+; add it, or leave",
        ),
        ("--commfuse-dp --no-use-commfuse", r"--commfuse-dp needs --use-commfuse, .+; add it"),
        (
            "--overlap-param-gather",
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; g",
        ),
        ("--compare", r"--compare has nothing .+ --commfuse-dp with --data-parallel-size of at le"),
        (
            "--compare --commfuse-dp --data-parallel-size 1",
            "--compare has nothing to compare at --tensor-model-parallel-size 1",
        ),
    ],
)
def test_errors_name_value_limit_and_way_out(options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arguments([*TINY.split(), *REPLICAS.split(), *options.split()], world_size=None)
