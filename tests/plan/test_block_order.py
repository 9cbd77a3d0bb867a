"""Blocks of unequal cost: the best order of distances."""

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.block_order import causal_costs, least_waiting, waiting


def test_waiting_by_hand() -> None:
    # Rank 0 of 2 computes the expensive block, sends it while it computes its own cheap one, and is
    # done at 4; rank 1 sends the cheap block by 2 and gets rank 0's at 3 + 1 = 4, its own computed.
    assert waiting((1.0, 3.0), (1,), "last") == (0.0, 0.0)
    # Links half as fast: rank 0 is done at 2, but rank 1 gets its partial only at 1.5 + 1.
    assert waiting((0.5, 1.5), (1,), "last") == (0.5, 0.5)
    # Rank 0 finishes its own block before rank 1's arrives; rank 1 does not wait.
    assert waiting((0.5, 1.5), (1,), "first") == (0.5, 0.0)


@pytest.mark.parametrize("own", ["first", "last"])
@pytest.mark.parametrize(
    ("size", "in_order", "best"),
    [(4, 1.0, 0.75), (6, 1.5, 5 / 6), (8, 2.0, 1.0), (16, 4.0, 1.5)],
)
def test_causal_blocks_wait_less(own: str, size: int, in_order: float, best: float) -> None:
    costs = causal_costs(size)
    order = least_waiting(costs, own)
    assert sorted(order) == list(range(1, size))
    assert max(waiting(costs, range(1, size), own)) == pytest.approx(in_order)
    assert max(waiting(costs, order, own)) == pytest.approx(best)


def test_the_first_block_is_the_first_of_the_order() -> None:
    schedule = Schedule(lanes=1, causal=True)
    assert [hop.target for hop in schedule.hops(0, 8, "last")] == [3, 6, 1, 4, 7, 2, 5]
