"""Online tuning of schedules: all ranks choose the same one, and results stay correct."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule, Transport, tuning
from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    linear_reduce_scatter,
)
from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.tuning import Tuning, decisions
from tests.limits import PATIENT

ROWS, INPUTS, OUTPUTS = 64, 32, 48


def _pretend(patch: pytest.MonkeyPatch, seconds: Callable[[int | None], float]) -> list[object]:
    """Let a trial with ``chunks`` report ``seconds(chunks)``; it still runs.  Lists the trials."""
    ran: list[object] = []

    def timed(transport: Transport, name: str, call: Any) -> float:
        call()
        (schedule,) = call.args
        ran.append(schedule)
        return seconds(schedule and schedule.chunks)

    patch.setattr(tuning, "_timed", timed)
    return ran


def _layer(
    transport: AnyTransport, op: str, options: LinearOptions, link: Transport
) -> tuple[list[torch.Tensor], list[Schedule | None]]:
    """Output and gradients of a layer on ``transport``, and the decisions of ``link``."""
    generator = torch.Generator().manual_seed(link.rank)
    rows = ROWS if op == "column" else ROWS * link.size
    x = torch.randn(rows, INPUTS, generator=generator).requires_grad_()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).requires_grad_()
    call: Any = all_gather_linear if op == "column" else linear_reduce_scatter
    y = call(x, weight, transport=transport, options=options)
    grads = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    return [y.detach(), *grads], list(decisions(link).values())


def _wanted(rank: int, op: str, chunks: int | None, folder: str | None) -> Any:
    """Let ``chunks`` (``None``: the plain path) be fastest; rank 1 also finds one chunk fast."""
    link = Transport.create(lanes=2, timeout=PATIENT)
    options = LinearOptions(Schedule(lanes=2), tuning=Tuning(folder))

    def seconds(mine: int | None) -> float:
        # The slowest rank counts: a schedule that is fast on rank 1 alone is not chosen.
        return 1.0 if mine == chunks else 2.0 if rank == 1 and mine == 1 else 3.0

    with pytest.MonkeyPatch.context() as patch:
        ran = _pretend(patch, seconds)
        tensors, decided = _layer(link, op, options, link)
        tried = len(ran)
        again, _ = _layer(link, op, options, link)
    assert len(ran) == tried, "asked once"
    assert all(map(torch.equal, tensors, again))
    link.close()
    return tensors, decided, tried


def _fixed(rank: int, op: str, schedule: Schedule | None) -> list[torch.Tensor]:
    link = Transport.create(lanes=2, timeout=PATIENT)
    plain = CollectiveTransport(link.group, same_pieces=schedule is not None)
    tensors, _ = _layer(plain, op, LinearOptions(schedule or Schedule()), link)
    link.close()
    return tensors


@pytest.mark.parametrize("op", ["column", "row"])
@pytest.mark.parametrize("chunks", [None, 4])
def test_all_ranks_take_what_is_fastest_and_compute_the_same(
    ranks, op: str, chunks: int | None
) -> None:
    results = ranks(3).run(_wanted, op, chunks, None)
    decided = results[0][1]
    assert len(decided) == 2, "a forward and a backward"
    for schedule in decided:
        assert (schedule and schedule.chunks) == chunks
    reference = ranks(3).run(_fixed, op, decided[0])
    for (tensors, choices, _), expected in zip(results, reference, strict=True):
        assert choices == decided
        assert all(map(torch.equal, tensors, expected))


def _cached(rank: int, folder: str) -> Any:
    # Rank 1 names another folder; the folder of rank 0 is used.
    rank_folder = folder if rank == 0 else folder + " of nobody"
    _, decided, tried = _wanted(rank, "column", 2, rank_folder)
    return decided, tried, Path(rank_folder).exists()


def test_what_was_found_is_kept_for_the_next_run(ranks, tmp_path) -> None:
    first, second = (ranks(2).run(_cached, str(tmp_path / "kept")) for _ in range(2))
    assert all(tried > 0 for _, tried, _ in first)
    assert [tried for _, tried, _ in second] == [0, 0]
    assert [decided for decided, *_ in second] == [decided for decided, *_ in first]
    assert [exists for *_, exists in second] == [True, False]


def _halves(rank: int, fast_forward: bool) -> Any:
    """One half of a layer is fastest on the plain path, the other one with four chunks."""
    link = Transport.create(lanes=1, timeout=PATIENT)
    options = LinearOptions(Schedule(lanes=1), tuning=Tuning())

    def seconds(mine: int | None) -> float:
        forward = not decisions(link)
        return 1.0 if mine == (4 if forward == fast_forward else None) else 2.0

    with pytest.MonkeyPatch.context() as patch:
        _pretend(patch, seconds)
        tensors, decided = _layer(link, "row", options, link)
    link.close()
    return tensors, [schedule and schedule.chunks for schedule in decided]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_layer_of_which_one_half_is_worth_fusing_is_fused(ranks, fast_forward: bool) -> None:
    plain = ranks(2).run(_fixed, "row", None)
    for (tensors, decided), wanted in zip(ranks(2).run(_halves, fast_forward), plain, strict=True):
        assert decided == ([4, None] if fast_forward else [None, 4])
        for ours, reference in zip(tensors, wanted, strict=True):
            torch.testing.assert_close(ours, reference)
