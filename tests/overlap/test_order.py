"""Turn orders: the fastest is chosen, and all ranks use the same one."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_npu.overlap import ForwardBackwardOverlap, HandOverPoint, pair
from commfuse_npu.plan.turn_order import best_order, duration, strict_turns
from commfuse_npu.proof.verify_log import verify_logs
from commfuse_npu.runtime.order_log import OrderLog
from tests.distributed.ranks import on_ranks
from tests.overlap import test_pair

END = HandOverPoint(1.0, 0.0, waits=None, by_default=False)
BLOCKING = HandOverPoint(1.0, 1.0, waits=0, by_default=True)
LONG = HandOverPoint(1.0, 4.0, waits=0, by_default=True)


def test_duration_by_hand() -> None:
    sides = [BLOCKING, BLOCKING, END], [BLOCKING, END]
    # Run one after the other, every transfer is exposed: 5 pieces, 3 transfers.
    assert duration(sides, ((False,) * 3, (False,) * 2)) == 8
    assert duration(sides, strict_turns(sides)) == 5
    sides = [LONG, END], [LONG, END]
    # Transfers share one link: 1, 1 + 4, 1 + 4 + 4, 1.
    assert duration(sides, strict_turns(sides)) == 10


@st.composite
def points(draw: st.DrawFn) -> list[HandOverPoint]:
    """Random points of one side, whose transfers are awaited at once, later or out of order."""
    side, under_way = [], 0
    for _ in range(draw(st.integers(1, 4))):
        transfer = float(draw(st.integers(0, 3)))
        under_way += transfer > 0
        waits = draw(st.integers(0, under_way - 1)) if under_way and draw(st.booleans()) else None
        under_way -= waits is not None
        side.append(
            HandOverPoint(float(draw(st.integers(0, 4))), transfer, waits, draw(st.booleans()))
        )
    return side


@settings(max_examples=60, deadline=None)
@given(points(), points())
@example(  # a search that keeps four states misses the best order
    [
        HandOverPoint(*point, False)
        for point in ((0, 0, None), (0, 1, None), (1, 1, None), (0, 1, None))
    ],
    [
        HandOverPoint(*point, False)
        for point in ((0, 1, None), (0, 0, None), (3, 0, None), (0, 1, 1))
    ],
)
def test_the_best_of_all_lists_is_found(
    forward: list[HandOverPoint], backward: list[HandOverPoint]
) -> None:
    sides = forward, backward
    lists = [itertools.product((False, True), repeat=len(side)) for side in sides]
    best = min(duration(sides, order) for order in itertools.product(*lists))
    assert duration(sides, best_order(sides)) == best


@on_ranks(2)
def test_an_order_is_chosen_from_what_was_recorded(rank: int) -> None:
    overlap = ForwardBackwardOverlap([test_pair.world()])

    def side(transfers: int) -> int:
        for _ in range(transfers):
            dist.all_reduce(torch.ones(2))
        work = dist.all_reduce(torch.ones(2), async_op=True)
        full = torch.empty(dist.get_world_size())
        dist.all_gather_into_tensor(full, torch.ones(1), async_op=True).wait()
        work.wait()
        return transfers

    sides = partial(side, 1), partial(side, 2)
    assert overlap.record(*sides, "kind") == (1, 2)
    blocking, began, end = (True, 0, True), (True, None, False), (False, None, False)
    tail = [began, began, (False, 1, False), (False, 0, True), end]  # waits of gather and sum
    assert [
        [(point.transfer > 0, point.waits, point.by_default) for point in side]
        for side in overlap.recorded["kind"]
    ] == [[blocking, *tail], [blocking, blocking, *tail]]
    overlap.choose_orders()
    assert overlap.run(*sides, "kind") == (1, 2)
    overlap.check()
    assert [len(part) for part in overlap.orders["kind"]] == [6, 7]


@on_ranks(2)
def test_ranks_share_the_order_that_was_found(rank: int) -> None:
    """The search returns another order on each rank; check() compares the one each rank uses."""
    overlap = ForwardBackwardOverlap([test_pair.world()])
    transfer = partial(dist.all_reduce, torch.ones(1))
    overlap.record(transfer, transfer)
    with mock.patch.object(pair, "best_order", return_value=((rank == 0,),) * 2):
        overlap.choose_orders()
    overlap.check()


def recorded_pairs(rank: int, folder: str, longer: bool) -> None:
    """Two pairs; with ``longer`` the forward of rank 1 does not hand over at its first point."""
    log = OrderLog(Path(folder), rank, 2)
    overlap = ForwardBackwardOverlap([test_pair.world()], order_log=log)
    if longer and rank == 1:
        overlap.orders = {None: ((False, True), (True, True))}

    def side() -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))

    for _ in range(2):
        overlap.run(side, side)
    log.close()


def test_an_order_of_one_rank_alone_is_seen_in_the_order_log(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(recorded_pairs, str(tmp_path / "same"), False)
    verdict = verify_logs([tmp_path / "same"])
    assert (verdict.faults, verdict.notes, verdict.operations) == ([], [], 2 * 2 * 4)
    ranks(2).run(recorded_pairs, str(tmp_path / "differ"), True)
    faults = "\n".join(verify_logs([tmp_path / "differ"]).faults)
    assert "ranks 0 and 1 do not do the same as collective 1 (all_reduce of a backward)" in faults
