"""``produce_exchange_and_consume`` against the unfused lines of its docstring, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commfuse_npu.plan import Plan, Schedule, split, taper_down
from commfuse_npu.runtime.collectives import all_to_all_rows
from commfuse_npu.runtime.pipeline import consumed_rows, produce_exchange_and_consume
from tests.distributed.test_pipeline import ROWS, data, schedules, transport


def through(rank: int, batched: bool, schedule: Schedule, dtype: torch.dtype) -> None:
    link = transport(batched)
    plan = schedule.plan("all_to_all", rank, link.size, own="last")
    blocks = data(rank, ROWS * link.size, dtype)
    whole = all_to_all_rows(blocks, link.group)
    done: list[tuple[str, slice]] = []
    got = torch.zeros_like(whole)

    def produce(rows: slice, out: torch.Tensor) -> None:
        done.append(("make", rows))
        out.copy_(blocks[rows])

    def consume(piece: torch.Tensor, rows: slice) -> None:
        done.append(("use", rows))
        got[rows] += piece

    received = torch.full_like(whole, float("nan"))
    result = produce_exchange_and_consume(
        produce, consume, received, transport=link, plan=plan, name="through"
    )
    assert result is received
    assert torch.equal(received, whole)
    assert torch.equal(got, whole)
    made, used = plan.computed_rows(ROWS), consumed_rows(plan, ROWS)
    assert done == [*(("make", rows) for rows in made), *(("use", rows) for rows in used)]
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    assert made[-1] == used[0] == own, "own block not made last and used first"
    assert arrivals(plan) == used[1:]
    assert not link._in_flight


def arrivals(plan: Plan) -> list[slice]:
    """What the plan's messages bring, read off its drawing, not off the pipeline."""
    found = []
    for step in plan.transfers:
        source, target, chunk = step.receive.piece
        if target == plan.rank:
            # Pieces get longer the later they are made, if they are not all of one length.
            taper = plan.schedule.taper
            down = taper_down(ROWS, plan.chunks, taper) if taper > 1 else split(ROWS, plan.chunks)
            bounds = [ROWS - bound for bound in reversed(down)] if taper > 1 else down
            found.append(slice(source * ROWS + bounds[chunk], source * ROWS + bounds[chunk + 1]))
    return found


def every(rank: int, batched: bool, size: int) -> None:
    costs = Schedule(lanes=2, chunks=2, costs=tuple(float(rank) for rank in range(size)))
    for schedule in (*schedules(size), costs):
        for dtype in (torch.float32, torch.bfloat16):
            through(rank, batched, schedule, dtype)


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_collective(ranks: Any, size: int, batched: bool) -> None:
    ranks(size).run(every, batched, size)


def refused(rank: int) -> None:
    link = transport(False)
    received = torch.zeros(2 * ROWS, 3)
    first = Schedule().plan("all_to_all", rank, 2, own="first")
    last = Schedule().plan("all_to_all", rank, 2)
    for tensor, plan, words in (
        (received, first, "needs a all_to_all plan with the own block last"),
        (received[1:], last, "13 rows are not divisible by the group size 2; pad them"),
        (received.t().contiguous().t(), last, "is not contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            produce_exchange_and_consume(
                lambda rows, out: out.zero_(),
                lambda piece, rows: None,
                tensor,
                transport=link,
                plan=plan,
            )
    through(rank, False, Schedule(), torch.float32)


def test_bad_input_is_refused_before_anything_is_sent(ranks: Any) -> None:
    ranks(2).run(refused)
