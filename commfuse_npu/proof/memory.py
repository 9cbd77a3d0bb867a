"""Maps the spans of a program to memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from commfuse_npu.plan.instructions import Span, common, line
from commfuse_npu.plan.program import Program, Region

__all__ = ["Memory", "MemoryRange", "Shape", "describe"]

Shape = tuple[int, int]
"""Rows and columns."""

_Home = tuple[str, int]
"""Memory within which spans may overlap: a buffer of the operation, or one slot of scratch."""


class MemoryRange(NamedTuple):
    """Memory of a span: runs of rows of an operation's buffer, or of elements of scratch."""

    home: _Home
    columns: tuple[int, int]
    runs: list[tuple[int, int]]

    def meets(self, other: MemoryRange) -> bool:
        """Whether the two overlap."""
        return (
            self.home == other.home
            and common(self.columns, other.columns)
            and any(common(run, other_run) for run in self.runs for other_run in other.runs)
        )


class Memory:
    """The buffers of a program and their memory, from :attr:`Program.layout`.

    Args:
        shapes: of the operation's buffers.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = dict(shapes)
        self.wide: set[str] = set()
        self._offsets: dict[str, int] = {}
        self._homes: dict[str, _Home] = {buffer: (buffer, 0) for buffer in shapes}
        self._buffers: defaultdict[_Home, list[str]] = defaultdict(list)
        self._ranges: dict[Span, MemoryRange] = {}
        end, home = defaultdict[Region, int](lambda: -1), ("", 0)
        in_order = sorted(program.layout.items(), key=lambda item: item[1][:2])
        for buffer, (region, offset, rows, columns) in in_order:
            self.shapes[buffer] = rows, columns
            self._offsets[buffer] = offset
            if offset >= end[region]:
                kind = "late " * region.late + "wide " * region.wide
                home = f"{kind}scratch", offset
            self._homes[buffer] = home
            self._buffers[home].append(buffer)
            end[region] = max(end[region], offset + rows * columns)
            if region.wide:
                self.wide.add(buffer)

    def columns(self, span: Span) -> tuple[int, int]:
        return span.columns or (0, self.shapes[span.buffer][1])

    def width(self, span: Span) -> int:
        first, last = self.columns(span)
        return last - first

    def wrong(self, span: Span) -> str | None:
        """Why a span is invalid; ``None`` if it is valid."""
        if span.buffer not in self.shapes:
            return f"{span.buffer} is neither a buffer of the operation nor scratch of the program"
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

    def range_of(self, span: Span) -> MemoryRange:
        """The memory of a valid span."""
        known = self._ranges.get(span)
        if known is None:
            known = self._ranges[span] = self._locate(span)
        return known

    def _locate(self, span: Span) -> MemoryRange:
        home, runs = self._homes[span.buffer], span.runs()
        if span.buffer not in self._offsets:
            return MemoryRange(home, self.columns(span), runs)
        offset, width = self._offsets[span.buffer], self.shapes[span.buffer][1]
        return MemoryRange(
            home, (0, 1), [(offset + a * width, offset + b * width) for a, b in runs]
        )

    def shared(self, span: Span) -> Iterator[tuple[str, int, int]]:
        """``(buffer, first, after the last)`` rows of other scratch buffers that overlap a span."""
        home, _, runs = self.range_of(span)
        buffers = self._buffers.get(home, ())
        for buffer in buffers if len(buffers) > 1 else ():
            offset, (rows, width) = self._offsets[buffer], self.shapes[buffer]
            for start, stop in runs if buffer != span.buffer and width else ():
                first = max(0, (start - offset) // width)
                last = min(rows, -(-(stop - offset) // width))
                if first < last:
                    yield buffer, first, last


def describe(program: Program, index: int) -> str:
    """Describe an instruction for an error message."""
    return f"rank {program.rank}, instruction {index} ({line(program.code[index])})"
