"""Where the rows of a program are, and that nobody touches rows that are on their way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from commfuse_npu.plan.program import End, Post, Program, Span, Stretch, Wait, accesses, line

__all__ = ["Memory", "Shape", "common", "instruction", "memory_faults"]

Shape = tuple[int, int]
"""Rows and columns."""

_Home = tuple[str, int]
"""Memory that overlaps: a buffer of the operation, or scratch of one slot."""


class _Place(NamedTuple):
    """Runs of rows of an operation's buffer, or of elements of scratch memory."""

    home: _Home
    columns: tuple[int, int]
    runs: list[tuple[int, int]]


class Memory:
    """The memory of a program, as its layout has it.

    Args:
        shapes: of the buffers that the operation brings along.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = dict(shapes)
        self.wide: set[str] = set()
        self._offsets: dict[str, int] = {}
        self._homes: dict[str, _Home] = {buffer: (buffer, 0) for buffer in shapes}
        self._buffers: defaultdict[_Home, list[str]] = defaultdict(list)
        self._places: dict[Span, _Place] = {}
        end, home = defaultdict[Stretch, int](lambda: -1), ("", 0)
        in_order = sorted(program.layout.items(), key=lambda item: item[1][:2])
        for buffer, (stretch, offset, rows, columns) in in_order:
            self.shapes[buffer] = rows, columns
            self._offsets[buffer] = offset
            if offset >= end[stretch]:
                kind = "late " * stretch.late + "wide " * stretch.wide
                home = f"{kind}scratch", offset
            self._homes[buffer] = home
            self._buffers[home].append(buffer)
            end[stretch] = max(end[stretch], offset + rows * columns)
            if stretch.wide:
                self.wide.add(buffer)

    def columns(self, span: Span) -> tuple[int, int]:
        return span.columns or (0, self.shapes[span.buffer][1])

    def width(self, span: Span) -> int:
        first, last = self.columns(span)
        return last - first

    def wrong(self, span: Span) -> str | None:
        """Why there are no such rows."""
        if span.buffer not in self.shapes:
            return f"{span.buffer} is neither the operation's nor the program's"
        rows, columns = self.shapes[span.buffer]
        first, last = self.columns(span)
        runs = span.runs()
        if not all(0 <= start <= stop <= rows for start, stop in runs):
            return f"{span.buffer} has {rows} rows"
        if not 0 <= first <= last <= columns:
            return f"{span.buffer} has {columns} columns"
        if any(stop > start for (_, stop), (start, _) in pairwise(runs)):
            return f"the runs of {span.buffer} overlap"
        return None

    def place(self, span: Span) -> _Place:
        """Where the rows are, as far as there are such rows."""
        found = self._places.get(span)
        if found is None:
            found = self._places[span] = self._place(span)
        return found

    def _place(self, span: Span) -> _Place:
        home, runs = self._homes[span.buffer], span.runs()
        if span.buffer not in self._offsets:
            return _Place(home, self.columns(span), runs)
        offset, width = self._offsets[span.buffer], self.shapes[span.buffer][1]
        return _Place(home, (0, 1), [(offset + a * width, offset + b * width) for a, b in runs])

    def shared(self, span: Span) -> Iterator[tuple[str, int, int]]:
        """The rows of other scratch buffers that are the same memory in part."""
        home, _, runs = self.place(span)
        buffers = self._buffers.get(home, ())
        for buffer in buffers if len(buffers) > 1 else ():
            offset, (rows, width) = self._offsets[buffer], self.shapes[buffer]
            for start, stop in runs if buffer != span.buffer and width else ():
                first = max(0, (start - offset) // width)
                last = min(rows, -(-(stop - offset) // width))
                if first < last:
                    yield buffer, first, last


def instruction(program: Program, at: int) -> str:
    """Which instruction, in words."""
    return f"rank {program.rank}, instruction {at} ({line(program.code[at])})"


def memory_faults(program: Program, memory: Memory) -> Iterator[str]:
    """Where a program takes rows that do not exist, or that are on their way.

    Nothing may be read or written where a message arrives, nor written where one leaves, before it
    was waited for; messages are whole contiguous rows; in the end everything was waited for.  What
    is computed is not written over what it is computed from, but element by element in place.
    """
    under_way = {"receive": (arriving := _UnderWay()), "send": (leaving := _UnderWay())}
    known: set[Span] = set()
    for at, one in enumerate(program.code):
        reads, writes = accesses(one)
        for span in (*reads, *writes):
            wrong = None if span in known else memory.wrong(span)
            if wrong is not None:
                yield f"{instruction(program, at)}: {wrong}"
                return
            known.add(span)
        found = [
            *_touched("reads", reads, "arrives", arriving, memory),
            *_touched("writes", writes, "arrives", arriving, memory),
            *_touched("writes", writes, "leaves", leaving, memory),
        ]
        in_place = not isinstance(one, Post) and getattr(one, "work", None) != "gemm"
        for read, written in product(map(memory.place, reads), map(memory.place, writes)):
            if common(read, written) and not (in_place and read == written):
                found.append("it writes over what it reads")
        if isinstance(one, Post):
            for way, end in one.ends:
                found += _unfit(end, memory)
                under_way[way].add(end, memory.place(end.span))
        elif isinstance(one, Wait):
            found += [
                f"it has posted no {way} of step {step}"
                for way, step in one.ends
                if not under_way[way].waited(step)
            ]
        for fault in found:
            yield f"{instruction(program, at)}: {fault}"
    for what, ends in (("arrives", arriving), ("leaves", leaving)):
        for end in ends.left():
            yield f"rank {program.rank} never waits for what {what}: {end.transfer}"


def _touched(
    verb: str, spans: Sequence[Span], what: str, ends: _UnderWay, memory: Memory
) -> Iterator[str]:
    for span in spans:
        end = ends.hit(memory.place(span))
        if end is not None:
            yield f"it {verb} {span.buffer} where {end.transfer} {what}, and has not waited for it"


def _unfit(end: End, memory: Memory) -> Iterator[str]:
    if end.span.columns is not None or end.span.times != 1:
        yield f"{end.transfer} is not rows one below the other"
    if end.span.buffer in memory.wide:
        yield f"{end.transfer} has the dtype of sums, a message that of the operation"


def common(one: _Place, other: _Place) -> bool:
    """Whether two places have something in common."""
    if one.home != other.home:
        return False
    if one.columns[0] >= other.columns[1] or other.columns[0] >= one.columns[1]:
        return False
    for a, b in one.runs:
        for c, d in other.runs:
            if (a if a > c else c) < (b if b < d else d):
                return True
    return False


class _UnderWay:
    """Messages that were not waited for."""

    def __init__(self) -> None:
        self._ends: defaultdict[_Home, dict[int, tuple[End, _Place]]] = defaultdict(dict)
        self._posted: dict[int, _Home] = {}

    def add(self, end: End, place: _Place) -> None:
        self._ends[place.home][end.transfer.step] = end, place
        self._posted[end.transfer.step] = place.home

    def hit(self, here: _Place) -> End | None:
        """A message that has memory in common with this."""
        there = self._ends.get(here.home, {}).values()
        return next((end for end, place in there if common(here, place)), None)

    def waited(self, step: int) -> bool:
        """Whether it was posted; then it is not under way any more."""
        home = self._posted.get(step)
        if home is not None:
            self._ends[home].pop(step, None)
        return home is not None

    def left(self) -> list[End]:
        return [end for there in self._ends.values() for end, _ in there.values()]
