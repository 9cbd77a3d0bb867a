"""Trainings with replicas: buckets by our transfers and by the collective, to the same bits."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.checkpoint import find_checkpoint, shape_of_run
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.interrupt import StopRequest
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.command_line import compare

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 5 --lr-warmup-iters 1 --eval-interval 5 --eval-iters 1 --save-interval 3 "
    "--tensor-model-parallel-size 1 --distributed-timeout-minutes 2 "
    "--data-parallel-size 2 --use-distributed-optimizer"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"


def pretrain(folder: Path, options: str, mode: str = "commfuse", resume: bool = False) -> Any:
    """One training of these ranks: losses, the hash of all weights, and what was fused."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from scripts.cpu_pretraining.megatron_on_cpu import megatron_on_cpu
    from scripts.cpu_pretraining.training import train

    args = parse_arguments([*TINY.split(), *options.split()], world_size=dist.get_world_size())
    corpus = load_corpus(
        str(ROOT / "commfuse_npu"), valid_fraction=0.05, seq_length=args.seq_length, need_valid=True
    )
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size)
    try:
        with megatron_on_cpu():
            found = None
            if resume:
                facts = shape_of_run(args, corpus.fingerprint())
                found = find_checkpoint(folder / "checkpoints", facts)
            outcome = train(
                args,
                corpus,
                mode=mode,
                folder=folder,
                stop=StopRequest(),
                resume_from=found,
                checkpoints="save" in str(folder),
            )
    finally:
        parallel_state.destroy_model_parallel()
    return list(outcome.losses.values()), outcome.weights_sha256, outcome.linears


def alone(rank: int, folder: Path) -> dict[str, Any]:
    """Two replicas without tensor parallelism."""
    found = {}
    for name, options in (("plain", "--fp32"), ("overlap", f"--fp32 {OVERLAP}")):
        for form in ("--commfuse-dp", "--no-commfuse-dp"):
            where = folder / f"{name}{form}"
            found[name, form] = pretrain(where, f"{options} {form}")
    again = f"--fp32 {OVERLAP} --commfuse-dp"
    found["overlap", "saved"] = pretrain(folder / "save", again)
    if rank == 0:
        shutil.rmtree(folder / "save/checkpoints/iter_0000005")
    found["overlap", "resumed"] = pretrain(folder / "save", again, resume=True)
    return found


def test_replicas_repeated_and_resumed(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(alone, tmp_path, timeout=200)[0]
    losses = {name: run[0] for name, run in found.items()}
    weights = {name: run[1] for name, run in found.items()}
    for name in ("plain", "overlap"):
        assert losses[name, "--commfuse-dp"] == losses[name, "--no-commfuse-dp"]
        assert weights[name, "--commfuse-dp"] == weights[name, "--no-commfuse-dp"]
    # Buckets make other shards, over which the gradient norm is summed: other rounding.
    assert losses["plain", "--commfuse-dp"] == pytest.approx(losses["overlap", "--commfuse-dp"])
    assert losses["plain", "--commfuse-dp"][-1] < losses["plain", "--commfuse-dp"][0]
    assert weights["overlap", "saved"] == weights["overlap", "--commfuse-dp"]
    assert losses["overlap", "resumed"] == losses["overlap", "saved"][3:]
    assert weights["overlap", "resumed"] == weights["overlap", "saved"]

    assert "  gradients: 5 buckets fused" in found["plain", "--commfuse-dp"][2]
    assert "  parameters: 5 buckets fused" in found["plain", "--commfuse-dp"][2]
    overlapped = " ".join(found["overlap", "--commfuse-dp"][2])
    assert int(re.findall(r"gradients: (\d+) buckets fused", overlapped)[0]) >= 5 * 4
    assert not any("gradients" in line for line in found["plain", "--no-commfuse-dp"][2])


def halves(rank: int, folder: Path) -> list[Any]:
    """Two replicas of two halves each, whose linear layers are fused as well."""
    layout = f"--bf16 --tensor-model-parallel-size 2 --sequence-parallel {OVERLAP}"
    runs = []
    for form in ("--commfuse-dp", "--no-commfuse-dp"):
        options = f"{layout} {form} --train-iters 3 --eval-interval 0"
        runs.append(pretrain(folder / form, options))
    return runs


def test_with_tensor_parallelism(ranks, tmp_path: Path) -> None:
    fused, collective = ranks(4).run(halves, tmp_path, timeout=200)[0]
    assert fused[:2] == collective[:2]
    for name in ("gradients", "parameters", "qkv", "output"):
        assert any(f" {name}: " in line and line.endswith("fused") for line in fused[2])


def test_compare_from_the_command_line(tmp_path: Path) -> None:
    printed = compare(tmp_path, *TINY.split(), "--commfuse-dp", *OVERLAP.split())
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
            "--commfuse-dp --commfuse-schedule ring",
            r"--commfuse-dp and --commfuse-schedule ring exclude each other: .+; choose auto",
        ),
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
        parse_arguments([*TINY.split(), *options.split()], world_size=None)
