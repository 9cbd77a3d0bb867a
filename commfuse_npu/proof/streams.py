"""Proves that what two streams of a device do with the same memory has an order.

An order comes from the stream itself, from an event that is held for, and from a transfer that is
waited for: it begins when the stream that posted it has come to it.  Two instructions that touch
the same memory, one of which writes it, have to be in order, or they are a race.  What came before
the program, or before its mark, is as unknown to the second stream as what the first one did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commfuse_npu.plan.program import (
    Hold,
    Mark,
    Post,
    Program,
    Record,
    Span,
    Wait,
    accesses,
    is_aside,
)
from commfuse_npu.proof.memory import Memory, common, instruction

__all__ = ["stream_faults"]


_End = tuple[str, int]
_Touched = tuple[Sequence[Span], Sequence[Span]]


class _Place(NamedTuple):
    """Of an instruction: in the code, and on which stream."""

    at: int
    aside: bool


class _Clock(NamedTuple):
    """As far as here the instructions of the two streams are done, by place in the code."""

    first: int
    aside: int

    def now(self, at: int, aside: bool) -> _Clock:
        """That of a stream which has come to a place in the code."""
        return _Clock(self.first, at) if aside else _Clock(at, self.aside)

    def after(self, other: _Clock) -> _Clock:
        return _Clock(max(self.first, other.first), max(self.aside, other.aside))

    def knows(self, place: _Place) -> bool:
        return place.at < (self.aside if place.aside else self.first)


def stream_faults(program: Program, memory: Memory) -> Iterator[str]:
    """Where two streams race, or one holds for what never comes."""
    if not any(map(is_aside, program.code)):
        return
    clocks = {False: _Clock(0, 0), True: _Clock(-1, 0)}
    events: dict[int, _Clock] = {}
    begun: dict[int, _Clock] = {}
    ends: dict[_End, Span] = {}
    waits: defaultdict[_End, list[_Place]] = defaultdict(list)
    touches: list[tuple[_Place, _Touched]] = []
    marked = 0
    for at, one in enumerate(program.code):
        aside = is_aside(one)
        mine = clocks[aside].now(at, aside)
        if isinstance(one, Mark):
            marked = at + 1
        elif isinstance(one, Record):
            events[one.event] = mine
        elif isinstance(one, Hold):
            if one.event not in events:
                yield f"{instruction(program, at)}: nobody has recorded this event"
                return
            clocks[aside] = mine.after(events[one.event])
        elif isinstance(one, Wait):
            for way, step in one.ends:
                mine = mine.after(begun.get(step, mine))
                waits[way, step].append(_Place(at, aside))
            clocks[aside] = mine
        elif isinstance(one, Post):
            begun[one.transfer.step] = mine
            ends |= {(way, end.transfer.step): end.span for way, end in one.ends}
        reads, writes = accesses(one)
        if not reads and not writes:
            continue
        if mine.first < marked:
            yield f"{instruction(program, at)}: it does not hold for what came before"
            return
        for place, touched in touches:
            if not mine.knows(place) and _race((reads, writes), touched, memory):
                yield f"{instruction(program, at)}: it races with {instruction(program, place.at)}"
                return
        for (way, step), places in waits.items():
            span = ends.get((way, step))
            if span is None or any(p.aside == aside or mine.knows(p) for p in places):
                continue
            moved = ([], [span]) if way == "receive" else ([span], [])
            if _race((reads, writes), moved, memory):
                yield (
                    f"{instruction(program, at)}: only the other stream has waited for the {way} "
                    f"of step {step}"
                )
                return
        if not isinstance(one, Post):
            touches.append((_Place(at, aside), (reads, writes)))
    if any(not clocks[False].knows(place) for place, _ in touches if place.aside):
        yield f"rank {program.rank} ends without holding for what is aside"


def _race(one: _Touched, other: _Touched, memory: Memory) -> bool:
    (reads, writes), (other_reads, other_writes) = one, other
    pairs = [(a, b) for a in writes for b in (*other_reads, *other_writes)]
    pairs += [(a, b) for a in reads for b in other_writes]
    return any(common(memory.place(a), memory.place(b)) for a, b in pairs)
