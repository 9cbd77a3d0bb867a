"""Faults that are planted, one at a time: a test of what it breaks notices each."""

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
from tests.overlap import test_order, test_pair


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


def at_every_group(turns: Turns, groups: object, log: object) -> Any:
    return transfers.take_turns_at_transfers(turns, EveryGroup())  # type: ignore[arg-type]


def gathers_hand_over_late(_: Any, wait_hands_over: bool) -> Any:
    return original(_, True)


original = transfers._collective


def of_the_other_side(self: Turns, by_default: bool, *_: Any) -> None:
    chosen, at = self._order[1 - self.side], self._places[self.side]
    self._places[self.side] += 1
    if chosen[at] if at < len(chosen) else by_default:
        self.hand_over()


def bits(rank: int) -> None:
    test_pair.random_models(rank, range(15))


def order(rank: int) -> None:
    assert test_pair.sequence(rank) == test_pair.SEQUENCE


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


FAULTS: dict[str, tuple[Any, str, Any, Callable[[int], Any]]] = {
    "no side has random states of its own": (RandomState, "restore", nothing, bits),
    "no side has attributes of its own": (Attributes, "restore", nothing, bits),
    "the backward's random states stay": (Turns, "end", forward_state_is_not_put_back, bits),
    "a hand-over is lost": (Turns, "hand_over", nothing, order),
    "other groups hand over": (pair, "take_turns_at_transfers", at_every_group, order),
    "an asynchronous gather hands over": (transfers, "_collective", gathers_hand_over_late, order),
    "the forward runs alone": (
        pair.ForwardBackwardOverlap,
        "run",
        lambda self, forward, backward, kind=None: (forward(), backward())[::1],
        order,
    ),
    "a result is used before its wait": (transfers, "_collective", a_wait_is_lost, test_pair.late),
    "an order is not shared": (dist, "broadcast_object_list", nothing, own_order),
    "the second thread has no context": (pair._Context, "enter", nothing, test_pair.context),
    "nothing is refused": (transfers, "_refused", lambda it, *_: it, test_pair.refused),
    "each side reads the other one's list": (
        Turns,
        "place",
        of_the_other_side,
        lambda _: test_order.test_both_sides_complete_for_every_list((2, 3)),
    ),
}
NOTICED = "DID NOT RAISE|their collectives were matched wrongly"


def planted(rank: int, name: str) -> None:
    owner, attribute, fault, check = FAULTS[name]
    if check is own_order:  # the others are tests of their own
        check(rank)
    transfers._install.cache_clear()
    with mock.patch.object(owner, attribute, fault):
        check(rank)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(ranks: Any, name: str) -> None:
    for outcome in ranks(2).outcomes(planted, name):
        error = outcome.error
        assert isinstance(error, AssertionError) or re.search(NOTICED, str(error)), outcome
