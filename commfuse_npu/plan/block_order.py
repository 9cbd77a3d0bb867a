"""The order in which a rank takes the blocks of the others when their costs differ.

Under a causal mask the queries of the last rank see N times as many keys as those of the first.
All ranks compute all blocks, so their totals are equal.  But in the order of distance, 1, ..., N-1,
some ranks start with cheap blocks and wait for the links, and others end with them.  Every order of
distances is a valid schedule, because a step is still a permutation of the ranks; the costs decide
which order waits least.
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
    """Cost of attention of each block of queries under a causal mask, in transfers of a block.

    The mean is one transfer, where the order matters most.  If computing takes much longer, every
    order hides the transfers; if it takes much less, none does.
    """
    return tuple((2 * block + 1) / size for block in range(size))


def waiting(costs: Sequence[float], distances: Sequence[int], own: Own) -> tuple[float, ...]:
    """How long each rank waits for transfers; the unit is the transfer time of a block.

    A rank sends one block at a time and receives one at a time, each as soon as the data, the
    sender and the receiver are ready.

    Args:
        costs: time to compute the block of each rank, in the same unit.
        distances: the order of the peers, every distance ``1, ..., N-1`` once.
        own: ``first``: blocks arrive and are computed.  ``last``: they are computed and sent.
    """
    size = len(costs)
    total = sum(costs)
    if own == "first":
        times = list(costs)
        for arrived, distance in enumerate(distances, 1):
            for rank in range(size):
                times[rank] = max(times[rank], arrived) + costs[(rank - distance) % size]
        return tuple(time - total for time in times)
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
    """The order of distances with the least longest wait of a rank, then the least sum of waits.

    It tries all orders for up to 8 ranks, and the multiples of each stride for more.  Of equally
    good orders it takes the first in lexicographic order, or that of the smallest stride.
    """

    def badness(distances: tuple[int, ...]) -> tuple[float, float]:
        # Rounded, so that ties are ties on every machine.
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
