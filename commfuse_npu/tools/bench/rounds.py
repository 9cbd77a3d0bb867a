"""Rounds: every variant once, in an order that is drawn anew; the disturbed ones again.

Interleaving spreads what drifts (clock rates, other load) over all variants alike, shuffling keeps
a variant from always following the same neighbour.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commfuse_npu.tools.bench.disturbance import Load
from commfuse_npu.tools.bench.samples import Sample

__all__ = ["Measured", "measure"]

RunRound = Callable[[Sequence[str]], tuple[list[Sample], Load | None]]
"""Run these variants once, in this order."""


@dataclass(frozen=True)
class Measured:
    """The samples that count.

    Attributes:
        samples: by variant, a sample per round.
        rounds: how many rounds they are from.
        disturbed: how many of these were disturbed, because the limit of repetitions was reached.
        repeated: how many rounds were thrown away.
    """

    samples: dict[str, list[Sample]]
    rounds: int
    disturbed: int
    repeated: int


def measure(
    names: Sequence[str],
    rounds: int,
    run: RunRound,
    *,
    shuffle: random.Random,
    may_repeat: Callable[[], bool] = lambda: True,
    out_of_time: Callable[[], bool] = lambda: False,
    after_round: Callable[[], None] = lambda: None,
) -> Measured:
    """Run ``rounds`` rounds that nothing disturbed.

    Disturbed ones are run again, ``rounds`` of them at most and while ``may_repeat``.  If that is
    not enough, the least disturbed of the thrown away ones fill up, and the result says how many.

    Args:
        out_of_time: asked after each round; there is no other one then.
        after_round: called for each of the ``rounds``, not for repetitions.
    """
    good: list[dict[str, Sample]] = []
    bad: list[tuple[float, dict[str, Sample]]] = []
    while len(good) < rounds:
        run_so_far = len(good) + len(bad)
        if run_so_far and out_of_time():
            break
        if run_so_far >= rounds and (run_so_far >= 2 * rounds or not may_repeat()):
            break
        order = list(names)
        shuffle.shuffle(order)
        samples, load = run(order)
        found = dict(zip(order, samples, strict=True))
        if load is not None and load.disturbed:
            bad.append((load.others + load.steal, found))
        else:
            good.append(found)
        if run_so_far < rounds:
            after_round()
    bad.sort(key=lambda entry: entry[0])
    kept = good + [found for _, found in bad[: rounds - len(good)]]
    disturbed = len(kept) - len(good)
    return Measured(
        {name: [found[name] for found in kept] for name in names},
        len(kept),
        disturbed,
        len(bad) - disturbed,
    )
