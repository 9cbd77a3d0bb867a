"""Random cases find what is wrong, make it small, and can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from commfuse_npu.ops import weight
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime import transport
from tests.distributed.ranks import Outcome, Ranks
from tests.random_networks.campaign import campaign, failure_of
from tests.random_networks.case import Bucket, BucketRun, Case, Layer, Network
from tests.random_networks.compare import complaints
from tests.random_networks.strategy import cases


def remade(case: Case) -> Case:
    """From the Python that it is printed as."""
    names = {of.__name__: of for of in (Network, Layer, BucketRun, Bucket, Schedule)}
    made: Case = eval(repr(case), {"torch": torch, **names})
    return made


def odd_blocks_lose_a_row(rank: int, case: Case) -> list[str]:
    """A fault of weight gradients by blocks only, and of odd blocks only."""
    add = weight.WeightGradient.add

    def fault(self: Any, grad: Any, x: Any) -> None:
        by_blocks = self._total is not self._main_grad
        rows = len(grad) - len(grad) % 2 if by_blocks else len(grad)
        add(self, grad[:rows], x[:rows])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight.WeightGradient, "add", fault)
        return complaints(rank, case)


@pytest.mark.long
def test_a_fault_of_one_option_is_found_and_made_small(ranks) -> None:
    found = campaign(ranks(2), 100, seed=1, compare=odd_blocks_lose_a_row)
    case = found.smallest
    assert isinstance(case, Network), found
    (layer,) = case.layers
    assert layer.wgrad == "blocks"
    assert case.rows * (case.batch or 1) <= 3, case
    assert (layer.recompute, layer.schedule.chunks, case.micro_batches) == ("no", 1, 1)
    assert "weight.grad" in found.failure or "main_grad" in found.failure
    assert repr(case) in found.failure
    assert failure_of(ranks(2), remade(case), odd_blocks_lose_a_row)
    assert not failure_of(ranks(2), case)


def nothing_is_ever_finished(rank: int, case: Case) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport.Transport, "finished", lambda self, running: None)
        return complaints(rank, case)


def test_what_is_left_under_way_is_found(ranks) -> None:
    case = BucketRun(2, (Bucket(3),))
    assert "is still under way" in failure_of(ranks(2), case, nothing_is_ever_finished)
    assert not failure_of(ranks(2), case)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_a_printed_case_makes_itself_again(size: int) -> None:
    @settings(
        max_examples=50, database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(size))
    def printed(case: Case) -> None:
        assert remade(case) == case

    printed()


class _Noted(Ranks):
    """No processes: writes down what it is asked."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked: list[Case] = []

    def outcomes(self, *args: Any, **_: Any) -> list[Outcome]:
        self.asked.append(args[1])
        return [Outcome(value=[])] * self.size


def test_a_seed_stands_for_its_cases() -> None:
    one, same, other = _Noted(3), _Noted(3), _Noted(3)
    assert campaign(one, 57, seed=5).cases == len(set(one.asked)) == 57
    campaign(same, 57, seed=5)
    campaign(other, 57, seed=6)
    assert one.asked == same.asked
    assert one.asked != other.asked
