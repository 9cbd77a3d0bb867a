"""Run alternatives side by side until the fastest is known."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

__all__ = ["fastest"]

_ROUNDS = (1, 1, 4)
"""Rounds before the slower half goes; the last ones are between what is left."""

_FINALISTS = 3


def fastest(
    count: int,
    run: Callable[[Sequence[int]], Sequence[float]],
    *,
    usual: int = 0,
    simplest_within: float = 0.005,
) -> tuple[int, list[float | None]]:
    """The fastest of the alternatives ``0 ... count - 1``.

    Every round runs what is left once, in an order of its own, so that a machine that becomes
    slower or faster meanwhile treats them alike.

    Args:
        run: runs these alternatives in this order and gives their times in seconds; called alike
            on all ranks, with the same result on all ranks.
        usual: what is taken without a trial.  Another one has to be faster by more than the spread
            of both: on a busy machine differences are noise.
        simplest_within: of those that are slower by no more than this share than the fastest, the
            first is taken.

    Returns:
        its number, and the median of each that reached the last round, ``None`` for the others.
    """
    left = list(range(count))
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in left]
    run(left)  # buffers are allocated, connections and caches warm
    for number, rounds in enumerate(_ROUNDS):
        for _ in range(rounds):
            shuffled = order.sample(left, len(left))
            for alternative, seconds in zip(shuffled, run(shuffled), strict=True):
                times[alternative].append(seconds)
        if number < len(_ROUNDS) - 1:
            kept = max(_FINALISTS, len(left) // 2)
            ranked = sorted(left, key=lambda one: (statistics.median(times[one]), one))
            left = list(dict.fromkeys([*ranked[:kept], usual]))
    medians = {one: statistics.median(times[one]) for one in left}
    limit = min(medians.values()) * (1 + simplest_within)
    chosen = min(one for one, seconds in medians.items() if seconds <= limit)
    spread = max(_spread(times[one]) for one in (chosen, usual))
    if medians[usual] - medians[chosen] <= spread:
        chosen = usual
    return chosen, [medians.get(one) for one in range(count)]


def _spread(times: Sequence[float]) -> float:
    """Between the quartiles."""
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
