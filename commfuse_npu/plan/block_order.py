"""In which order a rank takes the blocks of the others when they do not all cost the same.

Under a causal mask the queries of the last rank see N times the keys of the first's.  All ranks
compute all blocks, so their total is the same; but with direct transfers in the order of distance,
1, ..., N-1, some ranks begin with the cheap blocks and wait for the links, and others end with
them.  Every order of distances is a valid schedule (a step is still one permutation of the ranks),
and which one waits least follows from the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from math import gcd
from typing import Literal

__all__ = ["Own", "causal_costs", "least_waiting", "waiting"]

Own = Literal["first", "last"]

_ALL_ORDERS_UP_TO = 8
"""7! orders take a fraction of a second, once per process."""


def causal_costs(size: int) -> tuple[float, ...]:
    """What attention of each block of queries costs under a causal mask.

    In transfers, and on average as much as one: there the order matters most.  Where computing is
    much dearer every order hides the transfers, and where it is much cheaper none does.
    """
    return tuple((2 * block + 1) / size for block in range(size))


def waiting(costs: Sequence[float], distances: Sequence[int], own: Own) -> tuple[float, ...]:
    """How long each rank waits for transfers, in times that a transfer of a block takes.

    A rank sends one block after the other and receives one after the other, each as early as its
    data, its sender and its receiver allow.

    Args:
        costs: what computing the block of each rank takes, in the same unit.
        distances: the order of the peers, every distance ``1, ..., N-1`` once.
        own: ``first``: blocks arrive and are computed.  ``last``: they are computed and sent.
    """
    size = len(costs)
    total = sum(costs)
    if own == "first":
        now = list(costs)
        for arrived, distance in enumerate(distances, 1):
            for rank in range(size):
                now[rank] = max(now[rank], arrived) + costs[(rank - distance) % size]
        return tuple(time - total for time in now)
    made, sent, received = ([0.0] * size for _ in range(3))
    for distance in distances:
        for rank in range(size):
            made[rank] += costs[(rank + distance) % size]
        ends = [
            max(made[rank], sent[rank], received[(rank + distance) % size]) + 1
            for rank in range(size)
        ]
        for rank, end in enumerate(ends):
            sent[rank] = received[(rank + distance) % size] = end
    return tuple(max(0.0, sent[r] - total, received[r] - total) for r in range(size))


@lru_cache(maxsize=64)
def least_waiting(costs: tuple[float, ...], own: Own) -> tuple[int, ...]:
    """The order of distances with the least waiting of the rank that waits longest, then of all.

    All orders are tried for up to 8 ranks, and the multiples of each stride beyond.  Of equals the
    one nearest to ``1, ..., N-1`` is taken.
    """

    def badness(distances: tuple[int, ...]) -> tuple[float, float]:
        # Rounded, so that equals are equal on every machine.
        times = waiting(costs, distances, own)
        return round(max(times), 9), round(sum(times), 9)

    return min(_orders(len(costs)), key=badness)


def _orders(size: int) -> Iterator[tuple[int, ...]]:
    if size <= _ALL_ORDERS_UP_TO:
        yield from permutations(range(1, size))
        return
    for stride in range(1, size):
        if gcd(stride, size) == 1:
            yield tuple(stride * k % size for k in range(1, size))
