"""Trainings under Ulysses context parallelism: fused, plain, unfused, and not split at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.checkpoint import FACTS_FILE, STATE_FILE, find_checkpoint, shape_of_run
from scripts.cpu_pretraining.data import load_corpus
from scripts.cpu_pretraining.interrupt import StopRequest
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.command_line import compare

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 5 --lr-warmup-iters 1 --eval-interval 5 --eval-iters 1 --save-interval 3 "
    "--tensor-model-parallel-size 1 --distributed-timeout-minutes 2"
)
CP2 = ("--context-parallel-size", "2")
FUSED = (*CP2, "--commfuse-ulysses")


def pretrain(folder: Path, mode: str, argv: tuple[str, ...], resume: bool = False) -> Any:
    """One training of these ranks."""
    from megatron.core import parallel_state

    from scripts.cpu_pretraining.megatron_on_cpu import megatron_on_cpu
    from scripts.cpu_pretraining.training import train

    args = parse_arguments([*TINY.split(), *argv], world_size=2)
    corpus = load_corpus(
        str(ROOT / "commfuse_npu"), valid_fraction=0.05, seq_length=args.seq_length, need_valid=True
    )
    parallel_state.initialize_model_parallel(context_parallel_size=args.context_parallel_size)
    try:
        with megatron_on_cpu():
            found = None
            if resume:
                facts = shape_of_run(args, corpus.fingerprint())
                found = find_checkpoint(folder / "checkpoints", facts)
            outcome = train(
                args, corpus, mode=mode, folder=folder, stop=StopRequest(), resume_from=found
            )
    finally:
        parallel_state.destroy_model_parallel()
    validation = re.findall(r'"validation_loss": ([\d.]+)', (folder / "metrics.jsonl").read_text())
    return outcome.losses, outcome.weights_sha256, outcome.linears, [float(v) for v in validation]


def pretrainings(rank: int, folder: Path) -> dict[str, Any]:
    found = {
        "fused": pretrain(folder / "fused", "commfuse", FUSED),
        "again": pretrain(folder / "again", "commfuse", FUSED),
        "plain": pretrain(folder / "plain", "plain", FUSED),
        "unfused": pretrain(folder / "unfused", "megatron", CP2),
        "replicas": pretrain(folder / "replicas", "megatron", ("--data-parallel-size", "2")),
    }
    if rank == 0:
        shutil.rmtree(folder / "again/checkpoints/iter_0000005")
    found["resumed"] = pretrain(folder / "again", "commfuse", FUSED, resume=True)
    return found


def test_fused_plain_unfused_repeated_resumed_and_not_split(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(pretrainings, tmp_path, timeout=200)[0]
    losses = {name: list(run[0].values()) for name, run in found.items()}
    weights = {name: run[1] for name, run in found.items()}
    assert losses["fused"][-1] < losses["fused"][0]
    assert losses["fused"] == losses["plain"] == losses["again"]
    assert weights["fused"] == weights["plain"] == weights["again"]
    # As many forwards as layers, micro-batches and iterations, and one validation.
    calls = 2 * 4 * (5 + 1)
    for layer in ("ulysses", "qkv", "proj"):
        assert f"  {layer}: {calls} forward calls fused" in found["fused"][2]
    assert not any("of ulysses" in line for line in found["fused"][2])
    assert not any("ulysses" in line for line in found["unfused"][2])
    assert losses["unfused"] == pytest.approx(losses["fused"], abs=1e-6)
    assert losses["replicas"] == pytest.approx(losses["fused"], abs=1e-5)
    assert found["replicas"][3] == pytest.approx(found["fused"][3], abs=1e-5)
    # From iteration 3 to 5: each rank has found its own state.
    assert losses["resumed"] == losses["fused"][3:]
    assert weights["resumed"] == weights["fused"]


def test_compare_from_the_command_line(tmp_path: Path) -> None:
    printed = compare(tmp_path, *TINY.split(), *FUSED)
    for layer in ("ulysses", "qkv", "proj"):
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* forward calls fused", printed)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--commfuse-ulysses"],
            r"--commfuse-ulysses needs --context-parallel-size of at least 2: .+; leave one of the",
        ),
        (
            [*FUSED, "--no-use-commfuse"],
            r"--commfuse-ulysses needs --use-commfuse, .+; add it",
        ),
        (
            [*CP2, "--commfuse-attention"],
            r"--commfuse-attention and --context-parallel-size exclude each other: .+; leave",
        ),
        (
            ["--context-parallel-size", "8"],
            r"heads 4 is not divisible by .+ context-parallel size 8; choose --num-attention-heads",
        ),
        (
            [*CP2, "--seq-length", "33"],
            r"length 33 is not divisible by the context-parallel size 2; choose --seq-length 32 or",
        ),
        (
            [*CP2, "--tensor-model-parallel-size", "2", "--seq-length", "34"],
            r"length 34 .+ times the context-parallel size 4; choose --seq-length 32 or 36",
        ),
    ],
)
def test_errors_name_value_limit_and_way_out(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arguments([*TINY.split(), *argv], world_size=None)


def test_processes_of_all_three_kinds() -> None:
    argv = [*TINY.split(), *CP2, "--data-parallel-size", "2"]
    assert parse_arguments(argv, world_size=4).num_microbatches == 2
    with pytest.raises(
        UsageError,
        match="3 processes were started, but --tensor-model-parallel-size 1 times "
        "--context-parallel-size 2 times --data-parallel-size 2 is 4; start 4",
    ):
        parse_arguments(argv, world_size=3)


def checkpoint_of(folder: Path, ranks: int, without: str = "") -> dict[str, Any]:
    """A checkpoint of two context-parallel ranks, as far as looking for it goes."""
    facts = shape_of_run(parse_arguments([*TINY.split(), *CP2], world_size=2), "data")
    checkpoint = folder / "iter_0000003"
    for rank in range(ranks):
        state = checkpoint / f"mp_rank_00_{rank:03d}" / STATE_FILE
        state.parent.mkdir(parents=True)
        state.touch()
    saved = {name: value for name, value in facts.items() if name != without}
    (checkpoint / FACTS_FILE).write_text(json.dumps(saved))
    return facts


def test_every_context_parallel_rank_has_a_state(tmp_path: Path) -> None:
    facts = checkpoint_of(tmp_path / "whole", 2)
    assert find_checkpoint(tmp_path / "whole", facts).iteration == 3
    checkpoint_of(tmp_path / "half", 1)
    with pytest.raises(UsageError, match="there is no complete checkpoint"):
        find_checkpoint(tmp_path / "half", facts)


def test_a_checkpoint_from_before_there_was_context_parallelism(tmp_path: Path) -> None:
    facts = checkpoint_of(tmp_path, 1, without="context_parallel_size")
    with pytest.raises(UsageError, match="with context_parallel_size 1, but this run has 2"):
        find_checkpoint(tmp_path, facts)
    assert find_checkpoint(tmp_path, {**facts, "context_parallel_size": 1}).iteration == 3
