"""The buffers of a program: their shapes, and which of them share memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from commfuse_npu.plan.instructions import Span, line, overlap
from commfuse_npu.plan.program import Program

__all__ = ["Memory", "Shape", "describe", "overlapping_slots"]

Shape = tuple[int, int]
"""Rows and columns."""


class Memory:
    """The buffers of a program.  Scratch buffers with the same slot are the same memory.

    Args:
        shapes: of the operation's buffers.

    Attributes:
        wide: the scratch buffers with the dtype of sums.
        slots: the slot of each buffer; one of the operation has its own.
    """

    def __init__(self, program: Program, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = dict(shapes)
        self.shapes |= {buffer.name: buffer[2:4] for buffer in program.scratch}
        self.wide = {buffer.name for buffer in program.scratch if buffer.wide}
        self.slots = {buffer: buffer for buffer in shapes}
        self.slots |= {buffer.name: buffer.slot for buffer in program.scratch}

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

    def beside(self, buffer: str) -> list[str]:
        """The other buffers of its slot."""
        slots = self.slots.items()
        return [other for other, slot in slots if slot == self.slots[buffer] and other != buffer]

    def meet(self, one: Span, other: Span) -> bool:
        """Whether two valid spans use the same memory; a slot has one buffer at a time."""
        if one.buffer == other.buffer:
            return overlap(one, other)
        return self.slots[one.buffer] == self.slots[other.buffer]


def overlapping_slots(program: Program) -> Iterator[str]:
    """The slots of scratch memory that share elements in :attr:`Program.layout`."""
    slots = {buffer.name: buffer.slot for buffer in program.scratch}
    regions = sorted(
        ((region, offset, offset + rows * columns), slots[buffer])
        for buffer, (region, offset, rows, columns) in program.layout.items()
        if rows * columns
    )
    for ((region, _, end), slot), ((other, start, _), next_slot) in pairwise(regions):
        if region == other and start < end and slot != next_slot:
            yield f"rank {program.rank}: the memory of {slot} and of {next_slot} overlaps"


def describe(program: Program, index: int) -> str:
    """Describe an instruction for an error message."""
    return f"rank {program.rank}, instruction {index} ({line(program.code[index])})"
