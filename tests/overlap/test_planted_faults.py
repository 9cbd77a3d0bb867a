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
from tests.overlap import test_pair

collective = transfers._collective
left_over: list[Any] = []


def nothing(*_: Any) -> None: ...


def a_wait_is_lost(function: Callable[..., Any], wait_hands_over: bool) -> Callable[..., Any]:
    """Blocking collectives are begun, and their results used at once."""

    def begun(*args: Any, **kwargs: Any) -> Any:
        if transfers._turns is None or kwargs.get("async_op"):
            return function(*args, **kwargs)
        left_over.append(function(*args, async_op=True, **kwargs))
        transfers._turns.hand_over()
        return None

    return begun


def forward_state_is_not_put_back(self: Turns, side: int, error: Any = None) -> None:
    self._ended[side] = True
    self.error = self.error or error
    if not self._ended[1 - side]:
        self._give_turn(1 - side)


def at_every_group(turns: Turns, groups: object, log: object) -> Any:
    every = mock.MagicMock(**{"__contains__.return_value": True})
    return transfers.take_turns_at_transfers(turns, every)


def transfer() -> None:
    dist.all_reduce(torch.ones(1))


def own_order(rank: int) -> None:
    """The search finds another order on each rank; they compare what each of them takes."""
    overlap = pair.ForwardBackwardOverlap([test_pair.world()])
    found = lambda sides: tuple((rank == 0,) * len(side) for side in sides)  # noqa: E731
    with mock.patch.object(pair, "best_order", found):
        overlap.record(transfer, transfer)
        overlap.choose_orders()
    overlap.check()


def bits(rank: int) -> None:
    test_pair.test_random_models.__wrapped__(rank, 15, False)


order = test_pair.test_sides_take_turns_at_blocking_transfers_of_named_groups.__wrapped__
late = test_pair.test_nobody_reads_what_is_under_way.__wrapped__
FAULTS: dict[str, tuple[Any, str, Any, Callable[[int], Any]]] = {
    "no side has random states of its own": (RandomState, "restore", nothing, bits),
    "no side has attributes of its own": (Attributes, "restore", nothing, bits),
    "the backward's random states stay": (Turns, "end", forward_state_is_not_put_back, bits),
    "other groups hand over": (pair, "take_turns_at_transfers", at_every_group, order),
    "an asynchronous gather hands over": (
        transfers, "_collective", lambda function, _: collective(function, True), order,
    ),
    "a result is used before its wait": (transfers, "_collective", a_wait_is_lost, late),
    "an order is not shared": (dist, "broadcast_object_list", nothing, own_order),
}  # fmt: skip


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
        told = re.search("their collectives were matched wrongly", str(error))
        assert isinstance(error, AssertionError) or told, outcome
