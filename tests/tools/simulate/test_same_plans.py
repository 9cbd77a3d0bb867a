"""The simulator plays the transport's plans: the same transfers, lanes and order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import Variant
from tests.tools.simulate.machines import ideal

SCHEDULES = [
    Schedule("shifted", 2, 1),
    Schedule("shifted", 3, 4, "block"),
    Schedule("shifted", 5, 2),
    Schedule("ring", 1, 1),
    Schedule("ring", 2, 2),
    Schedule("two_level", 3, 2, node_size=3),
]
ROWS = 8


@pytest.mark.parametrize("kind", ["gather", "reduce_scatter"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_transfer_of_the_plan_is_played_in_its_order(kind: str, schedule: Schedule) -> None:
    for number in range(6):
        rank = Rank(ideal(), number, 6, 6, Variant("fused", "fused", schedule=schedule))
        work: list[slice] = []

        def seconds(run: slice, work: list[slice] = work) -> float:
            work.append(run)
            return 1.0

        if kind == "gather":
            rank.gather_then_work("x", ROWS, 3.0, seconds)
        else:
            rank.work_then_scatter("x", ROWS, 3.0, seconds)
        plan = schedule.plan(kind, number, 6)
        assert work == plan.computed_rows(ROWS)
        exchanges = [op for op in rank.finish().operations if op.sends]
        assert len(exchanges) == len(plan.transfers)
        for operation, step in zip(exchanges, plan.transfers, strict=True):
            (sent,), (received,) = operation.sends, operation.receives
            assert operation.engine == f"lane {step.send.lane}"
            assert (sent.source, sent.target) == (number, step.send.target)
            assert (received.source, received.target) == (step.receive.source, number)
            assert sent.key[-2:] == (step.index, number)
            inside = plan.inside(step.send.piece, ROWS)
            assert sent.size == 3.0 * (inside.stop - inside.start)


@pytest.mark.parametrize("batched", [True, False])
def test_a_column_backward_posts_a_step_of_the_gather_per_block(batched: bool) -> None:
    # On HCCL the blocks of dgrad would otherwise queue behind the whole gather.
    variant = Variant("fused", "fused", schedule=Schedule(lanes=1))
    rank = Rank(replace(ideal(), batched=batched), 0, 4, 4, variant)
    rank.column_backward("fc", ROWS, 1.0, lambda run: 1.0, lambda run: 1.0, copied_row_bytes=0)
    posted = [op.name.split()[1] for op in rank.finish().operations if op.sends]
    gather, scatter = "re-gather", "dgrad"
    if batched:
        assert posted == [gather, gather, scatter, gather, scatter, scatter]
    else:
        assert posted == [gather] * 3 + [scatter] * 3
