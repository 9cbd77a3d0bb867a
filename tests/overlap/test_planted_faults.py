"""Faults that are planted in the turns: random models, or the order of the sides, show each."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.overlap import Attributes, RandomState, pair, transfers
from commfuse_npu.overlap.turns import Turns
from commfuse_npu.plan import slots, turn_order
from tests.distributed.ranks import Ranks
from tests.overlap import test_order, test_pair
from tests.plan import test_slots

SEEDS = range(15)


def nothing(*_: Any) -> None: ...


def a_wait_is_lost(function: Callable[..., Any], wait_hands_over: bool) -> Callable[..., Any]:
    """Blocking collectives are begun, and their results used at once."""

    def collective(*args: Any, **kwargs: Any) -> Any:
        turns = transfers._turns
        if turns is None or kwargs.get("async_op"):
            return function(*args, **kwargs)
        left_over.append(function(*args, async_op=True, **kwargs))
        turns.hand_over()
        return None

    return collective


left_over: list[Any] = []


def forward_state_is_not_put_back(self: Turns, side: int, error: Any = None) -> None:
    self._ended[side] = True
    self.error = self.error or error
    if not self._ended[1 - side]:
        self._give_turn(1 - side)


class EveryGroup:
    def __contains__(self, group: object) -> bool:
        return True

    def __getitem__(self, group: object) -> None: ...


def at_every_group(turns: Turns, groups: object) -> Any:
    return transfers.take_turns_at_transfers(turns, EveryGroup())  # type: ignore[arg-type]


def gathers_hand_over_late(_: Any, wait_hands_over: bool) -> Any:
    return original(_, True)


original = transfers._collective

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "no side has random states of its own": (RandomState, "restore", nothing),
    "no side has attributes of its own": (Attributes, "restore", nothing),
    "the backward's random states stay": (Turns, "end", forward_state_is_not_put_back),
}
ORDERS: dict[str, tuple[Any, str, Any]] = {
    "a hand-over is lost": (Turns, "hand_over", nothing),
    "other groups hand over": (pair, "take_turns_at_transfers", at_every_group),
    "the wait of an asynchronous gather hands over": (
        transfers,
        "_collective",
        gathers_hand_over_late,
    ),
}


def planted(rank: int, kind: str, name: str) -> None:
    owner, attribute, fault = (FAULTS if kind == "bits" else ORDERS)[name]
    transfers._install.cache_clear()
    with mock.patch.object(owner, attribute, fault):
        if kind == "bits":
            test_pair.random_models(rank, SEEDS)
        else:
            expected = ["f0", "b0", "f1", "b1", "f end", "b2", "b end", "|"]
            expected += ["not handed over", "b end", "handed over"]
            assert test_pair.sequence(rank) == expected


@pytest.mark.parametrize("name", FAULTS)
def test_other_bits_are_noticed(ranks: Any, name: str) -> None:
    for outcome in ranks(2).outcomes(planted, "bits", name):
        assert isinstance(outcome.error, AssertionError), outcome


@pytest.mark.parametrize("name", ORDERS)
def test_another_order_is_noticed(ranks: Any, name: str) -> None:
    for outcome in ranks(2).outcomes(planted, "order", name):
        assert isinstance(outcome.error, AssertionError), outcome


def result_used_too_early(rank: int) -> None:
    late = transfers._collective.__globals__["_collective"]
    assert late is original
    with mock.patch.object(transfers, "_collective", a_wait_is_lost):
        test_pair.late(rank)


def test_a_result_that_is_used_before_its_wait_is_noticed(ranks: Any) -> None:
    for outcome in ranks(2).outcomes(result_used_too_early):
        assert isinstance(outcome.error, AssertionError), outcome


# ------------------------------------------------------------- lists, slots, what is refused


def of_the_other_side(self: Turns, by_default: bool, *_: Any) -> None:
    chosen, at = self._order[1 - self.side], self._places[self.side]
    self._places[self.side] += 1
    if chosen[at] if at < len(chosen) else by_default:
        self.hand_over()


def without_waiting(self: Any, side: int, place: Any) -> Any:
    return in_time(self, side, place._replace(waits=None))


in_time = turn_order._State.after


def late_by_a_slot(stages: int, stage: int, chunks: int, microbatches: int) -> Any:
    plan = on_time(stages, stage, chunks, microbatches)
    empty = slots.Slot(None, None)
    return [empty, *plan] if stage else [*plan, empty]


on_time = slots.slots

IN_PROCESS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "each side reads the other one's list": (
        Turns,
        "place",
        of_the_other_side,
        lambda: test_order.test_both_sides_complete_for_every_list((2, 3)),
    ),
    "an estimate forgets the waits": (
        turn_order._State,
        "after",
        without_waiting,
        test_order.test_one_after_the_other_exposes_every_transfer,
    ),
    "a stage is a slot late": (
        test_slots,
        "slots",
        late_by_a_slot,
        lambda: test_slots.test_what_a_slot_needs_was_made_one_slot_before(2, 1, 4),
    ),
    "the search keeps the latest": (
        turn_order,
        "_earliest",
        lambda ways: ways[-1:],
        test_order.test_a_chosen_order_hands_over_between_dgrad_and_wgrad,
    ),
}


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_wrong_list_or_slot_is_noticed(name: str) -> None:
    owner, attribute, fault, check = IN_PROCESS[name]
    check()
    with mock.patch.object(owner, attribute, fault), pytest.raises(AssertionError):
        check()


def not_shared(objects: list[Any], *_: Any) -> None:
    """Each rank keeps the order that it found."""


def own_order(rank: int) -> None:
    """The search finds another order on each rank; they compare what each of them takes."""

    def found(sides: Any) -> Any:
        return tuple((rank == 0,) * len(side) for side in sides)

    overlap = pair.ForwardBackwardOverlap([test_pair.world()])
    with mock.patch.object(pair, "best_order", found):
        overlap.record(transfer, transfer)
        overlap.choose_orders()
    overlap.check()


def transfer() -> None:
    dist.all_reduce(torch.ones(1))


def order_is_not_shared(rank: int) -> None:
    own_order(rank)
    with mock.patch.object(dist, "broadcast_object_list", not_shared):
        own_order(rank)


def test_an_order_that_is_not_shared_is_noticed(ranks: Any) -> None:
    for outcome in ranks(2).outcomes(order_is_not_shared):
        assert re.search("their transfers met others than they should", str(outcome.error))


IN_RANKS: dict[str, tuple[Any, str, Any, Callable[[int], Any]]] = {
    "the second thread has no context": (pair._Context, "enter", nothing, test_pair.context),
    "nothing is refused": (
        transfers,
        "_refused",
        lambda function, *_: function,
        test_pair.refused,
    ),
    "the forward runs alone": (
        pair.ForwardBackwardOverlap,
        "run",
        lambda self, forward, backward, kind=None: (forward(), backward())[::1],
        test_pair.sequence,
    ),
}


def planted_in_ranks(rank: int, name: str) -> None:
    owner, attribute, fault, check = IN_RANKS[name]
    transfers._install.cache_clear()
    with mock.patch.object(owner, attribute, fault):
        check(rank)


@pytest.mark.parametrize("name", IN_RANKS)
def test_what_a_pair_promises_is_noticed(name: str) -> None:
    """In processes of their own: what is wrapped twice stays so."""
    own = Ranks(2)
    try:
        for outcome in own.outcomes(planted_in_ranks, name):
            failed = outcome.error
            assert failed is not None
            assert isinstance(failed, AssertionError) or "DID NOT RAISE" in str(failed)
    finally:
        own.kill()
