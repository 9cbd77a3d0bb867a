"""Proves that no instruction accesses memory in use by a transfer or by the other stream.

A stream is ordered after an instruction by its own order, by a :class:`WaitEvent`, or by a wait for
a transfer, which starts after the work before its post.  It is ordered after a transfer by a wait
for it.  If two instructions or transfers access the same memory and one of them writes,
the later has to be ordered after the earlier; else it is a fault.  The side stream is not ordered
after work before the program or before its ``AheadEnd``, either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from commfuse_npu.plan.instructions import (
    AheadEnd,
    Collective,
    End,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
    accesses,
    uses_side_stream,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.proof.memory import Memory, describe, overlapping_slots

__all__ = ["hazards"]


class _At(NamedTuple):
    """An instruction: its index in the code, and whether it is on the side stream."""

    at: int
    on_side_stream: bool

    def known(self, clock: _Clock) -> bool:
        return self.at < clock[self.on_side_stream]


_Clock = Sequence[int]
"""A stream is ordered after the instructions of the first and the side stream before these two
indices in the code."""


@dataclass(eq=False, slots=True)
class _Touch:
    """An access to rows by an instruction or a transfer.

    Attributes:
        done: the instructions that end it: itself, or the waits for the transfer.
        end: of the transfer, if it is one.
    """

    span: Span
    writes: bool
    done: list[_At]
    end: End | None = None

    def clashes(self, earlier: _Touch, clock: _Clock, memory: Memory) -> bool:
        """Whether it conflicts with an earlier access that is not complete for its stream."""
        if not (self.writes or earlier.writes) or any(at.known(clock) for at in earlier.done):
            return False
        return memory.meet(self.span, earlier.span)


def hazards(program: Program, memory: Memory) -> Iterator[str]:
    """The accesses of a program to rows that do not exist, are in flight, or are part of a race.

    Before the wait for a message, no instruction may access the rows where it arrives, nor write
    those that it is sent from.  Messages are whole contiguous rows, and all have to be waited for.
    No instruction writes over its inputs, except element by element in place.
    """
    yield from overlapping_slots(program)
    two_streams = any(map(uses_side_stream, program.code))
    clocks: dict[bool, _Clock] = {False: (0, 0), True: (-1, 0)}
    events: dict[int, _Clock] = {}
    begun: dict[int, _Clock] = {}
    touches: defaultdict[str, list[_Touch]] = defaultdict(list)  # by slot
    posted: dict[int, list[_Touch]] = {}
    checked: set[Span] = set()
    ahead_end = 0
    last_on_side = _At(-1, True)
    for at, instruction in enumerate(program.code):
        here = _At(at, uses_side_stream(instruction))
        clock = [*clocks[here.on_side_stream]]
        clock[here.on_side_stream] = at
        reads, writes = accesses(instruction)
        for span in (*reads, *writes):
            wrong = None if span in checked else memory.wrong(span)
            if wrong is not None:
                yield f"{describe(program, at)}: {wrong}"
                return
            checked.add(span)
        if isinstance(instruction, AheadEnd):
            ahead_end = at + 1
        elif isinstance(instruction, RecordEvent):
            events[instruction.event] = clock
        elif isinstance(instruction, WaitEvent):
            if instruction.event not in events:
                yield f"{describe(program, at)}: this event was never recorded"
                return
            clocks[here.on_side_stream] = [*map(max, clock, events[instruction.event])]
        elif isinstance(instruction, Wait):
            for step in instruction.steps:
                if step not in posted:
                    yield f"{describe(program, at)}: it has posted no step {step}"
                    continue
                clock = [*map(max, clock, begun[step])]
                for transfer in posted[step]:
                    transfer.done.append(here)
                    slot = touches[memory.slots[transfer.span.buffer]]
                    if not two_streams and transfer in slot:
                        slot.remove(transfer)
            clocks[here.on_side_stream] = clock
        elif (reads or writes) and clock[False] < ahead_end:
            yield f"{describe(program, at)}: the side stream does not wait for what came before"
            return
        ours = [
            _Touch(span, spans is writes, [here]) for spans in (reads, writes) for span in spans
        ]
        for touch in ours:
            slot = touches[memory.slots[touch.span.buffer]]
            clashing = [past for past in slot if touch.clashes(past, clock, memory)]
            # Report a race rather than a missing wait.
            other = min(clashing, key=lambda past: past.end is not None, default=None)
            if other is not None:
                yield f"{describe(program, at)}: {_clash(program, touch, other)}"
                if other.done:
                    return  # further faults are consequences
        in_place = (
            not isinstance(instruction, Post | Collective)
            and getattr(instruction, "work", None) != "gemm"
        )
        for read, written in product(ours[: len(reads)], ours[len(reads) :]):
            same = in_place and read.span == written.span
            if memory.meet(read.span, written.span) and not same:
                yield f"{describe(program, at)}: it writes over what it reads"
        if isinstance(instruction, Post | Collective):
            step = instruction.transfer.step
            begun[step] = clock
            posted[step] = []
            for way, end in instruction.ends:
                yield from (f"{describe(program, at)}: {wrong}" for wrong in _unfit(end, memory))
                touch = _Touch(end.span, way == "receive", [], end)
                posted[step].append(touch)
                touches[memory.slots[end.span.buffer]].append(touch)
        elif two_streams:
            last_on_side = here if here.on_side_stream and ours else last_on_side
            for touch in ours:
                touches[memory.slots[touch.span.buffer]].append(touch)
    for post in program.posts:
        if not posted[post.transfer.step][0].done:
            yield f"rank {program.rank} never waits for {post.transfer}"
    if last_on_side.at >= 0 and not last_on_side.known(clocks[False]):
        yield f"rank {program.rank} ends without waiting for the side stream"


def _clash(program: Program, touch: _Touch, other: _Touch) -> str:
    if other.end is None:
        return f"it races with {describe(program, other.done[0].at)}"
    transfer = other.end.transfer
    if other.done:
        way = "receive" if other.writes else "send"
        return f"only the other stream has waited for the {way} of step {transfer.step}"
    verb = "writes" if touch.writes else "reads"
    return (
        f"it {verb} {touch.span.buffer} where {transfer} {_ways(other)}, and has not waited for it"
    )


def _ways(transfer: _Touch) -> str:
    return "arrives" if transfer.writes else "leaves"


def _unfit(end: End, memory: Memory) -> Iterator[str]:
    if end.span.columns is not None or end.span.times != 1:
        yield f"{end.transfer} is not rows one below the other"
    if end.span.buffer in memory.wide:
        yield f"{end.transfer} has the dtype of sums, a message that of the operation"
