"""Chooses the points at which forward and backward hand over, from the times measured between them.

Strict turns hand over at every blocking transfer, whatever the lengths of the two pieces of work
that this pairs.  :func:`best_order` searches for the order that ends first, with a model of one
device, which computes one piece at a time, and one link, which moves one transfer at a time.  Any
order is correct: a side that does not hand over waits for its own transfer, and when one side has
ended, the other runs to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import le
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "FORWARD",
    "HandOverPoint",
    "Order",
    "best_order",
    "duration",
    "strict_turns",
    "turns",
]

FORWARD, BACKWARD = 0, 1
"""The sides."""

Order = tuple[tuple[bool, ...], tuple[bool, ...]]
"""For each point of the forward, and of the backward, whether it hands over there."""

_STATES_KEPT = 4
"""Least number of states kept per step of the search.  For 32 layers, 8 and 16 found no better
order, in three and ten times the time."""

_STATES_IN_ALL = 4096
"""Short lists keep more states per step: of four points a side, 8 miss the best by up to 30 %."""


class HandOverPoint(NamedTuple):
    """Where a side may hand over: after a transfer began, or before it waits for one.

    The last point of a side is its end.

    Attributes:
        work: seconds of computation since the previous point.
        transfer: seconds of the transfer that starts here, 0 if none does.
        waits: index of the transfer to wait for among the side's transfers in flight, 0 for the one
            started first; ``None`` for none.
        by_default: whether it hands over here in strict turns.
    """

    work: float
    transfer: float
    waits: int | None
    by_default: bool


Sides = tuple[Sequence[HandOverPoint], Sequence[HandOverPoint]]


class _State(NamedTuple):
    """When, in seconds, the device and the link are free, and the transfers of each side end."""

    now: float = 0.0
    link: float = 0.0
    due: tuple[float, float] = (0.0, 0.0)
    under_way: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    def after(self, side: int, point: HandOverPoint) -> _State:
        now, link, arrival = max(self.now, self.due[side]) + point.work, self.link, 0.0
        under_way = self.under_way[side]
        if point.transfer:
            link = max(link, now) + point.transfer
            under_way = (*under_way, link)
        if point.waits is not None:
            arrival = under_way[point.waits]
            under_way = under_way[: point.waits] + under_way[point.waits + 1 :]
        if side == FORWARD:
            return _State(now, link, (arrival, self.due[1]), (under_way, self.under_way[1]))
        return _State(now, link, (self.due[0], arrival), (self.under_way[0], under_way))

    @property
    def all(self) -> tuple[float, ...]:
        return (self.now, self.link, *self.due, *self.under_way[0], *self.under_way[1])


def strict_turns(sides: Sides) -> Order:
    """The order that hands over wherever that is the default."""
    forward, backward = (tuple(point.by_default for point in side) for side in sides)
    return forward, backward


def turns(order: Order) -> Iterator[tuple[int, int]]:
    """The side and the number of each piece of work, which ends at the point with this number."""
    side, at = FORWARD, [0, 0]
    while at != [len(points) for points in order]:
        number = at[side]
        if number < len(order[side]):
            yield side, number
            at[side] += 1
            if not order[side][number]:
                continue
        side = 1 - side


def duration(sides: Sides, order: Order) -> float:
    """Seconds until both sides have ended; the forward runs first."""
    state = _State()
    for side, number in turns(order):
        state = state.after(side, sides[side][number])
    return max(state.now, *state.due)


class _Way(NamedTuple):
    """How a state was reached: at the last point, ``side`` handed over or did not."""

    state: _State
    side: int = FORWARD
    handed_over: bool = False
    before: _Way | None = None


def best_order(sides: Sides) -> Order:
    """The order that ends first, among strict turns and the orders that a beam search finds.

    A step of the search is the number of points that each side has passed, and the side that is
    next.  It keeps the earliest few states of each step, which is enough to find the best order of
    eight points per side.  32 layers take some seconds.
    """
    reached: dict[tuple[int, int, int], list[_Way]] = {(0, 0, FORWARD): [_Way(_State())]}
    ends = len(sides[FORWARD]), len(sides[BACKWARD])
    limit = max(_STATES_KEPT, _STATES_IN_ALL // (ends[FORWARD] * ends[BACKWARD]))
    for _ in range(sum(ends)):
        following: dict[tuple[int, int, int], list[_Way]] = {}
        for (*at, side), ways in reached.items():
            point = sides[side][at[side]]
            at[side] += 1
            remaining = at[FORWARD] < ends[FORWARD], at[BACKWARD] < ends[BACKWARD]
            for way in ways:
                state = way.state.after(side, point)
                for handed_over in (False, True):
                    turn = 1 - side if handed_over else side
                    if remaining[turn] or not any(remaining):
                        key = at[FORWARD], at[BACKWARD], turn
                        following.setdefault(key, []).append(_Way(state, side, handed_over, way))
        reached = {key: _earliest(ways, limit) for key, ways in following.items()}
    last = min(
        (way for ways in reached.values() for way in ways),
        key=lambda way: max(way.state.now, *way.state.due),
    )
    order: tuple[list[bool], list[bool]] = [], []
    while last.before is not None:
        order[last.side].append(last.handed_over)
        last = last.before
    best = tuple(order[FORWARD][::-1]), tuple(order[BACKWARD][::-1])
    return min(strict_turns(sides), best, key=partial(duration, sides))


def _earliest(ways: list[_Way], many: int) -> list[_Way]:
    """The ``many`` earliest states, without those that another one beats in every time."""
    earliest: list[_Way] = []
    for way in sorted(ways, key=lambda way: (way.state.now, way.state.link, sum(way.state.due))):
        if not any(all(map(le, better.state.all, way.state.all)) for better in earliest):
            earliest.append(way)
            if len(earliest) == many:
                break
    return earliest
