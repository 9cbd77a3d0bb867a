"""Orders of turns: any list is correct, the chosen one ends first, all ranks have the same."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_npu.overlap import ForwardBackwardOverlap, Place
from commfuse_npu.overlap.turns import BACKWARD, FORWARD, Turns
from commfuse_npu.plan.turn_order import best_order, duration, strict_turns
from commfuse_npu.proof.verify_log import verify_logs
from commfuse_npu.runtime.order_log import OrderLog
from tests.overlap import test_pair

END = Place(1.0, 0.0, waits=None, by_default=False)
BLOCKING = Place(1.0, 1.0, waits=0, by_default=True)


def test_one_after_the_other_exposes_every_transfer() -> None:
    sides = [BLOCKING, BLOCKING, END], [BLOCKING, END]
    never = (False,) * 3, (False,) * 2
    assert duration(sides, never) == 8  # 5 pieces, 3 transfers
    assert duration(sides, strict_turns(sides)) == 5


def test_an_asynchronous_transfer_is_beside_its_own_side() -> None:
    begins, waits = Place(1.0, 1.0, None, False), Place(1.0, 0.0, 0, True)
    assert duration(([begins, waits, END], [END]), ((False,) * 3, (False,))) == 4
    short = waits._replace(work=0.25)
    assert duration(([begins, short, END], [END]), ((False,) * 3, (False,))) == 4
    assert duration(([begins, short, END], [END]), ((False, True, False), (False,))) == 3.25


def test_transfers_share_one_link() -> None:
    long = Place(1.0, 4.0, waits=0, by_default=True)
    sides = [long, END], [long, END]
    # The second transfer begins when the first one has ended: 1, 1 + 4, 1 + 4 + 4, 1.
    assert duration(sides, strict_turns(sides)) == 10


def test_a_chosen_order_hands_over_between_dgrad_and_wgrad() -> None:
    """A norm of the forward has a gather after it; the whole wgrad is there to hide it."""
    gather, scatter = Place(0.1, 1, 0, True), Place(4, 1, 0, True)
    dgrad_then_scatter, wgrad = Place(4, 1, None, False), Place(4, 0, 0, True)
    sides = [gather, scatter] * 3 + [END], [gather, dgrad_then_scatter, wgrad] * 3 + [END]
    work = sum(place.work for side in sides for place in side)
    chosen = best_order(sides)
    assert duration(sides, strict_turns(sides)) == pytest.approx(work + 2.7)
    assert duration(sides, chosen) == pytest.approx(work + 0.9)
    assert any(chosen[BACKWARD][1::3])


@st.composite
def places(draw: st.DrawFn) -> list[Place]:
    """Of one side: some wait at once, some later, some for what was begun before another."""
    found, under_way = [], 0
    for _ in range(draw(st.integers(1, 4))):
        transfer = float(draw(st.integers(0, 3)))
        under_way += transfer > 0
        waits = draw(st.integers(0, under_way - 1)) if under_way and draw(st.booleans()) else None
        under_way -= waits is not None
        found.append(Place(float(draw(st.integers(0, 4))), transfer, waits, draw(st.booleans())))
    return found


@settings(max_examples=60, deadline=None)
@given(places(), places())
@example(  # four states are too few for it
    [Place(*place, False) for place in ((0, 0, None), (0, 1, None), (1, 1, None), (0, 1, None))],
    [Place(*place, False) for place in ((0, 1, None), (0, 0, None), (3, 0, None), (0, 1, 1))],
)
def test_the_best_of_all_lists_is_found(forward: list[Place], backward: list[Place]) -> None:
    sides = forward, backward
    lists = [itertools.product((False, True), repeat=len(side)) for side in sides]
    best = min(duration(sides, order) for order in itertools.product(*lists))
    assert duration(sides, best_order(sides)) == best


@pytest.mark.parametrize("counts", [(0, 0), (0, 2), (3, 1), (2, 3)])
def test_both_sides_complete_for_every_list(counts: tuple[int, int]) -> None:
    """And run in the order of the list: the forward first, one side at a time."""
    lists = [list(itertools.product((False, True), repeat=count)) for count in counts]
    for order in itertools.product(*lists):
        turns, noted = Turns(order=order), []

        def side(me: int, turns: Turns = turns, noted: list[Any] = noted) -> None:
            if me == BACKWARD:
                turns.begin()
            for number in range(counts[me]):
                noted.append((me, number))
                turns.place(True)
            noted.append((me, "end"))
            turns.end(me)

        second = threading.Thread(target=side, args=(BACKWARD,), daemon=True)
        second.start()
        side(FORWARD)
        second.join(60)
        assert noted == expected(order, counts)


def expected(order: Any, counts: tuple[int, int]) -> list[Any]:
    """What a reader of the list would note."""
    noted: list[Any] = []
    at, side = [0, 0], FORWARD
    while len(noted) < sum(counts) + 2:
        number = at[side]
        at[side] += 1
        if number == counts[side]:
            noted.append((side, "end"))
            side = 1 - side
            continue
        noted.append((side, number))
        other_ended = at[1 - side] > counts[1 - side]
        if order[side][number] and not other_ended:
            side = 1 - side
    return noted


def recorded(rank: int) -> Any:
    overlap = ForwardBackwardOverlap([test_pair.world()])

    def side(transfers: int) -> Callable[[], str]:
        def run() -> str:
            for _ in range(transfers):
                dist.all_reduce(torch.ones(2))
            work = dist.all_reduce(torch.ones(2), async_op=True)
            full = torch.empty(dist.get_world_size())
            dist.all_gather_into_tensor(full, torch.ones(1), async_op=True).wait()
            work.wait()
            return f"{transfers}"

        return run

    assert overlap.record(side(1), side(2), "kind") == ("1", "2")
    kinds = [
        [(place.transfer > 0, place.waits, place.by_default) for place in side]
        for side in overlap.recorded["kind"]
    ]
    overlap.choose_orders()
    assert overlap.run(side(1), side(2), "kind") == ("1", "2")
    overlap.check()
    return kinds, overlap.orders


def test_an_order_is_chosen_from_what_was_recorded(ranks: Any) -> None:
    blocking, began, end = (True, 0, True), (True, None, False), (False, None, False)
    gather_waits, sum_waits = (False, 1, False), (False, 0, True)
    rest = [began, began, gather_waits, sum_waits, end]
    first, second = ranks(2).run(recorded)
    assert first == second
    kinds, orders = first
    assert kinds == [[blocking, *rest], [blocking, blocking, *rest]]
    assert [len(part) for part in orders["kind"]] == [6, 7]


def recorded_pairs(rank: int, folder: str, longer: bool) -> str:
    """Two pairs; the forward of rank 1 keeps its turn at its first place if it is ``longer``."""
    log = OrderLog(Path(folder), rank, 2)
    overlap = ForwardBackwardOverlap([test_pair.world()], order_log=log)
    if longer and rank == 1:
        overlap.orders = {None: ((False, True), (True, True))}

    def side() -> None:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))

    for _ in range(2):
        overlap.run(side, side)
    with contextlib.suppress(RuntimeError):  # its own error is tested elsewhere
        overlap.check()
    log.close()
    return ""


def test_an_order_of_one_rank_alone_is_seen_in_the_order_log(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(recorded_pairs, str(tmp_path / "same"), False)
    found = verify_logs([tmp_path / "same"])
    assert (found.faults, found.notes, found.operations) == ([], [], 2 * 2 * 4)

    ranks(2).run(recorded_pairs, str(tmp_path / "differ"), True)
    faults = "\n".join(verify_logs([tmp_path / "differ"]).faults)
    assert "ranks 0 and 1 do not do the same as collective 1 (all_reduce of a backward)" in faults
