"""Trainings whose chunks flow through whole layers: fused, plain, and Megatron's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.in_ranks import TINY, Finished, losses, pretrained, pretraining

FLOW = ("--commfuse-flow", "4")


@pytest.mark.parametrize(
    ("size", "options", "layers"),
    [
        (2, (), 2),
        (2, ("--recompute", "--no-gradient-accumulation-fusion"), 4),
        (4, ("--data-parallel-size", "2", "--use-distributed-optimizer"), 2),
    ],
)
def test_bits_of_the_plain_form_and_losses_of_megatrons(
    ranks, tmp_path: Path, size: int, options: tuple[str, ...], layers: int
) -> None:
    words = ("--train-iters", "4", "--eval-interval", "0", *FLOW, "--compare", *options)
    printed = pretrained(ranks(size), tmp_path, *words).out
    assert printed.splitlines()[-1] == "identical: True"
    # A layer of a micro-batch; recomputation runs it again.
    calls = layers * 4 * 4 * 2 // size
    assert re.search(rf"commfuse: +flow: {calls} forward calls fused", printed)
    ways = [losses(tmp_path / "llama_tiny/compare" / way) for way in ("commfuse", "megatron")]
    assert ways[0] == pytest.approx(ways[1], rel=1e-5)
    assert ways[0][-1] < ways[0][0]


def reversed_batches(rank: int, port: int, argv: list[str]) -> Finished:
    """A training whose micro-batches have their sequences in the other order."""
    from scripts.cpu_pretraining.data import Corpus

    own = Corpus.batch

    def batch(corpus: Corpus, split: str, samples: Sequence[int], *others: int) -> Any:
        return own(corpus, split, list(reversed(samples)), *others)

    with mock.patch.object(Corpus, "batch", batch):
        return pretraining(rank, port, argv)


def weights(run: Path, iterations: int) -> torch.Tensor:
    """Those after so many iterations, of all ranks, in a row, in fp64."""
    files = sorted(run.glob(f"checkpoints/iter_{iterations:07}/*/model_optim.pt"))
    models = [torch.load(file, weights_only=False)["model"] for file in files]
    tensors = [one for model in models for one in model.values() if isinstance(one, torch.Tensor)]
    return torch.cat([one.double().flatten() for one in tensors if one.is_floating_point()])


@pytest.mark.parametrize("iterations", [6, pytest.param(20, marks=pytest.mark.long)])
def test_as_near_to_megatron_as_megatron_with_its_rows_in_another_order(
    ranks, tmp_path: Path, iterations: int
) -> None:
    words = ("--train-iters", str(iterations), "--eval-interval", "0")
    pretrained(ranks(2), tmp_path, "--name", "flow", *words, *FLOW)
    alone = (*words, "--no-use-commfuse")
    pretrained(ranks(2), tmp_path, "--name", "megatron", *alone)
    pretrained(ranks(2), tmp_path, "--name", "permuted", *alone, work=reversed_batches)
    names = "flow", "megatron", "permuted"
    found, expected, _ = (losses(tmp_path / name) for name in names)
    assert len(expected) == iterations
    assert max(abs(one / other - 1) for one, other in zip(found, expected, strict=True)) <= 1e-5
    flow, own, permuted = (weights(tmp_path / name, iterations) for name in names)
    # Of 51,520 weights; all losses, rounded to fp32, may be the same by chance.
    assert torch.dist(permuted, own) > 0
    # Which of two is nearer is chance; none is of another kind.
    assert torch.dist(flow, own) <= 4 * torch.dist(permuted, own)


def test_resumed_and_evaluated(ranks, tmp_path: Path) -> None:
    def run(*options: str) -> str:
        return pretrained(ranks(2), tmp_path, "--name", "flow", *FLOW, *options).weights

    whole = run()
    expected = losses(tmp_path / "flow")
    shutil.rmtree(tmp_path / "flow/checkpoints/iter_0000006")
    assert run("--resume") == whole
    assert losses(tmp_path / "flow") == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--seq-length", "36"],
            r"--seq-length 36 is not divisible by 4 chunks times .+ 2; choose",
        ),
        (["--tensor-model-parallel-size", "1"], r"--commfuse-flow 4 needs --sequence-parallel"),
        (["--no-use-commfuse"], r"--commfuse-flow needs --use-commfuse"),
        (["--commfuse-flow", "1"], r"1 is less than 2"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_arguments([*TINY.split(), *FLOW, *argv], world_size=None)
