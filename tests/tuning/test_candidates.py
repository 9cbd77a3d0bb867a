"""The candidate schedules of the tuning."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.proof.cases import Case, arguments
from commfuse_npu.proof.verify import counter_examples
from commfuse_npu.tuning import candidates


@pytest.mark.parametrize(
    "schedule",
    [Schedule(lanes=3), Schedule("two_level", 3, node_size=2)],
)
def test_all_are_plans_that_hold_within_the_lanes_that_there_are(schedule: Schedule) -> None:
    schedules = candidates(schedule, 4, 1024)
    assert len(schedules) == len(set(schedules)) > 3
    for candidate in schedules:
        assert candidate.lanes <= schedule.lanes
        assert candidate.node_size == schedule.node_size
        assert candidate.shape in (schedule.shape, "collective")
        for rule in ("gather_gemm", "gemm_scatter"):
            programs = Case(rule, arguments(rule, 7, 4)[0], candidate, 4, True).programs()
            assert not counter_examples(programs)


def test_the_simplest_comes_first() -> None:
    first = candidates(Schedule(lanes=8), 4, 1024)[0]
    assert (first.lanes, first.chunks, first.taper) == (3, 1, 1.0)


def test_two_ranks_taper_and_small_blocks_are_not_cut() -> None:
    assert any(candidate.taper > 1 for candidate in candidates(Schedule(), 2, 1024))
    assert [candidate.chunks for candidate in candidates(Schedule(), 2, 31)] == [1]
    assert {candidate.chunks for candidate in candidates(Schedule(lanes=1), 8, 64)} == {1, 2, 3, 4}
