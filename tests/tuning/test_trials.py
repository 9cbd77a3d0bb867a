"""Which alternative wins, on synthetic times."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.tuning import fastest


class _Runs:
    """Every run takes the time of its alternative; the first round is 100 times slower."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.orders: list[list[int]] = []

    def __call__(self, order: Sequence[int]) -> list[float]:
        self.orders.append(list(order))
        slow = 100.0 if len(self.orders) == 1 else 1.0
        return [self.seconds[index] * slow for index in order]


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20))
def test_the_fastest_wins_or_a_simpler_one_that_is_as_fast(seconds: list[float]) -> None:
    runs = _Runs(seconds)
    chosen, medians = fastest(len(seconds), runs)
    best = min(seconds)
    assert seconds[chosen] <= best * 1.005
    assert all(earlier > best * 1.005 for earlier in seconds[:chosen])
    assert medians[chosen] == seconds[chosen], "the first run, which is slow, does not count"


def test_the_slower_half_is_not_run_again_and_every_round_has_its_order() -> None:
    runs = _Runs([5.0, 1.0, 4.0, 2.0, 3.0, 7.0, 6.0, 8.0])
    chosen, medians = fastest(8, runs, usual=7)
    assert chosen == 1
    sizes = [len(order) for order in runs.orders]
    assert sizes == [8, 8, 5, 4, 4, 4, 4]
    assert all(sorted(order) == [1, 2, 3, 4, 7] for order in runs.orders[2:3])
    assert all(sorted(order) == [1, 3, 4, 7] for order in runs.orders[3:])
    assert medians == [None, 1.0, None, 2.0, 3.0, None, None, 8.0]
    assert runs.orders[1] != list(range(8)), "shuffled"


def test_what_is_usual_is_not_overruled_by_less_than_the_spread() -> None:
    noise = iter([0.0, 0.3, -0.3, 0.2, -0.2, 0.1] * 20)

    def run(order: Sequence[int]) -> list[float]:
        return [(1.0 if index else 1.1) + next(noise) for index in order]

    assert fastest(2, run, usual=0)[0] == 0
    assert fastest(2, lambda order: [1.0 if index else 1.1 for index in order], usual=0)[0] == 1
