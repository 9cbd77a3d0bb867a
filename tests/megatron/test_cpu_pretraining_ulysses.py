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
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.in_ranks import TINY, losses, pretrained

ALONE = ("--tensor-model-parallel-size", "1")
CP2 = ("--context-parallel-size", "2")
FUSED = (*CP2, "--commfuse-ulysses")


def test_fused_resumed_and_not_split(ranks, tmp_path: Path) -> None:
    def run(name: str, *options: str) -> Any:
        words = ("--train-iters", "5", "--name", name, *ALONE, *options)
        return pretrained(ranks(2), tmp_path, *words)

    fused = run("fused", *FUSED)
    # As many forwards as layers, micro-batches and iterations, and two validations.
    calls = 2 * 4 * (5 + 2)
    for layer in ("ulysses", "qkv", "proj"):
        assert f"  {layer}: {calls} forward calls fused" in fused.out
    assert "of ulysses" not in fused.out
    expected = losses(tmp_path / "fused")
    assert expected[-1] < expected[0]

    run("replicas", "--no-use-commfuse", "--data-parallel-size", "2")
    assert losses(tmp_path / "replicas") == pytest.approx(expected, abs=1e-5)
    pattern = r'"validation_loss": ([\d.]+)'
    found, other = (
        [float(v) for v in re.findall(pattern, (tmp_path / n / "metrics.jsonl").read_text())]
        for n in ("fused", "replicas")
    )
    assert found == pytest.approx(other, abs=1e-5)

    # From iteration 3 to 5: each rank has found its own state.
    shutil.rmtree(tmp_path / "fused/checkpoints/iter_0000005")
    assert run("fused", *FUSED, "--resume").weights == fused.weights
    assert losses(tmp_path / "fused") == expected


def test_compare(ranks, tmp_path: Path) -> None:
    options = ("--train-iters", "2", "--eval-interval", "0", *ALONE, *FUSED, "--compare")
    printed = pretrained(ranks(2), tmp_path, *options).out
    assert printed.splitlines()[-1] == "identical: True"
    for layer in ("ulysses", "qkv", "proj"):
        assert re.search(rf"commfuse: +{layer}: [1-9]\d* forward calls fused", printed)
    ways = [losses(tmp_path / "llama_tiny/compare" / way) for way in ("commfuse", "megatron")]
    assert ways[0] == pytest.approx(ways[1], abs=1e-6)


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
        parse_arguments([*TINY.split(), *ALONE, *argv], world_size=None)


def test_processes_of_all_three_kinds() -> None:
    argv = [*TINY.split(), *ALONE, *CP2, "--data-parallel-size", "2"]
    assert parse_arguments(argv, world_size=4).num_microbatches == 2
    with pytest.raises(
        UsageError,
        match="3 processes were started, but --tensor-model-parallel-size 1 times "
        "--context-parallel-size 2 times --data-parallel-size 2 is 4; start 4",
    ):
        parse_arguments(argv, world_size=3)


def checkpoint_of(folder: Path, ranks: int, without: str = "") -> dict[str, Any]:
    """A checkpoint of two context-parallel ranks, as far as looking for it goes."""
    facts = shape_of_run(parse_arguments([*TINY.split(), *ALONE, *CP2], world_size=2), "data")
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
