"""Faults that are planted in the turns: random models, or the order of the sides, show each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from commfuse_npu.overlap import Attributes, RandomState, pair, transfers
from commfuse_npu.overlap.turns import Turns
from tests.overlap import test_pair

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
