"""Executes the programs of all ranks with symbolic contents in place of numbers.

At first each row of an operation's buffer has its own symbol.  Row i of a result of a work depends
on row i of its first input with as many rows, and on its other inputs as a whole.  A work without
such an input, called for a run of rows, makes each row from its index.  Sums are ordered tuples of
their parts.  Messages and copies move contents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    End,
    Post,
    Span,
    Wait,
    common,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.proof.memory import Memory, describe

__all__ = ["Contents", "Execution", "WorkCall", "execute"]

NOTHING = 0
"""The content of rows that were not written, or not since they became invalid."""

_MOST_WORDS = 200

Columns = tuple[int, int]


class Contents:
    """Numbers the contents of rows; equal contents have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._entries: list[tuple[Any, ...]] = [("nothing",)]

    def _number(self, entry: tuple[Any, ...]) -> int:
        number = self._numbers.setdefault(entry, len(self._entries))
        if number == len(self._entries):
            self._entries.append(entry)
        return number

    def row(self, rank: int, buffer: str, row: int, columns: Columns) -> int:
        """The initial content of a row of an operation's buffer."""
        return self._number(("row", rank, buffer, row, columns))

    def whole(self, rows: Sequence[int]) -> int:
        """The content of several rows together."""
        return self._number(("whole", *rows))

    def run(self, row: int) -> int:
        """The input of a work that makes a row from its index alone."""
        return self._number(("run", row))

    def made(self, work: str, rank: int, row: int, others: Sequence[int] = (), out: int = 0) -> int:
        """The row that a rank's work makes for its output number ``out``."""
        return self._number((work, rank, out, row, *others))

    def sum(self, parts: Sequence[int]) -> int:
        """The sum in this order; extends the first part if it is a sum; a single part is itself."""
        if len(parts) == 1:
            return parts[0]
        first = self._entries[parts[0]]
        if first[0] == "sum":
            return self._number((*first, *parts[1:]))
        return self._number(("sum", *parts))

    def parts(self, number: int) -> tuple[int, ...]:
        """The parts of a sum; any other content is its only part."""
        kind, *parts = self._entries[number]
        return tuple(parts) if kind == "sum" else (number,)

    def words(self, number: int) -> str:
        """Describe a content."""
        words = self._words(number)
        return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]} ..."

    def _words(self, number: int) -> str:
        kind, *parts = self._entries[number]
        if kind == "nothing":
            return "nothing"
        if kind == "row":
            rank, buffer, row, (first, last) = parts
            return f"{buffer}[{row}, {first}:{last}] of rank {rank}"
        if kind == "run":
            return f"row {parts[0]}"
        if kind == "whole":
            return self._block(parts) or f"({', '.join(map(self._words, parts))})"
        if kind == "sum":
            return " + ".join(map(self._words, parts))
        rank, _, *inputs = parts
        return f"{kind}({', '.join(map(self._words, inputs))}) of rank {rank}"

    def _block(self, rows: Sequence[int]) -> str | None:
        """Describe consecutive rows of one buffer; ``None`` if they are something else."""
        entries = [self._entries[row] for row in rows]
        if not entries or entries[0][0] != "row":
            return None
        _, rank, buffer, start, columns = entries[0]
        stop = start + len(entries)
        first, last = columns
        if entries != [("row", rank, buffer, row, columns) for row in range(start, stop)]:
            return None
        return f"{buffer}[{start}:{stop}, {first}:{last}] of rank {rank}"


class WorkCall(NamedTuple):
    """A call of a work: contents of the rows of each input, and whether it has outputs."""

    at: int
    work: str
    run: slice | None
    inputs: list[list[int]]
    makes: bool


def execute(
    programs: Sequence[Program], memories: Sequence[Memory], contents: Contents
) -> list[Execution]:
    """Execute the programs of all ranks.

    Args:
        programs: those that passed the checks of pairing, order and memory.
    """
    mail: dict[tuple[int, int], list[int]] = {}
    ranks = [
        Execution(program, memory, contents, mail)
        for program, memory in zip(programs, memories, strict=True)
    ]
    while sum(rank.go_on() for rank in ranks):
        pass
    return ranks


class Execution:
    """The execution of one rank's program; ``mail`` has the sent rows by (step, source).

    Attributes:
        calls: the calls of works, in order.
        faults: why the program was not executed to its end.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        contents: Contents,
        mail: dict[tuple[int, int], list[int]],
    ) -> None:
        self._program = program
        self._memory = memory
        self._contents = contents
        self._mail = mail
        self._scratch = program.layout
        self._at = 0
        # Per buffer and columns, row by row.
        self._rows: defaultdict[str, dict[Columns, list[int]]] = defaultdict(dict)
        # By step of the post.
        self._arriving: defaultdict[int, list[End]] = defaultdict(list)
        self.calls: list[WorkCall] = []
        self.faults: list[str] = []

    def written(self) -> dict[str, dict[Columns, list[int]]]:
        """For each changed buffer of the operation, the content of each row, by columns."""
        changed = {
            buffer: {at: rows for at, rows in planes.items() if rows != self._at_first(buffer, at)}
            for buffer, planes in self._rows.items()
            if buffer not in self._scratch
        }
        return {buffer: planes for buffer, planes in changed.items() if planes}

    def _fault(self, problem: str) -> None:
        self.faults.append(f"{describe(self._program, self._at)}: {problem}")

    def go_on(self) -> bool:
        """Execute until a wait blocks; whether any instruction was executed."""
        code = self._program.code
        began = self._at
        while self._at < len(code) and not self.faults:
            instruction = code[self._at]
            if isinstance(instruction, Wait):
                if not self._land(instruction):
                    break
            elif isinstance(instruction, Post | Collective):
                for way, end in instruction.ends:
                    transfer, span = end
                    if way == "send":
                        self._mail[transfer.step, transfer.source] = self._read(span)
                    else:
                        self._arriving[instruction.transfer.step].append(end)
                        self._write(span, [NOTHING] * span.rows)
            elif isinstance(instruction, Compute):
                self._compute(instruction)
            elif isinstance(instruction, Add):
                self._add(instruction)
            elif isinstance(instruction, Copy):
                out, source, _ = instruction
                shapes = [(span.rows, self._memory.width(span)) for span in (out, source)]
                if shapes[0] != shapes[1]:
                    self._fault("it copies into rows or columns of another number")
                else:
                    self._write(out, self._read(source))
            self._at += 1
        return self._at > began

    def _land(self, wait: Wait) -> bool:
        """Deliver the messages of a wait if all of them were sent; whether they were."""
        arrivals = [end for step in wait.steps for end in self._arriving[step]]
        if any((step, source) not in self._mail for (step, _, source, *_), _ in arrivals):
            return False
        for (step, _, source, *_), span in arrivals:
            self._write(span, self._mail[step, source])
        for step in wait.steps:
            del self._arriving[step]
        return True

    def _compute(self, instruction: Compute) -> None:
        work, outs, ins, run = instruction
        contents = self._contents
        rank = self._program.rank
        width = self._memory.width
        inputs = [self._read(span) for span in ins]
        if work == "gemm":
            result, *_ = outs
            a, b, *_ = ins
            if (width(a), width(result)) != (b.rows, width(b)):
                self._fault("the columns of its matrices do not fit")
        for number, out in enumerate(outs):
            by_row = next((k for k, rows in enumerate(inputs) if len(rows) == out.rows), None)
            wholes = [contents.whole(rows) for k, rows in enumerate(inputs) if k != by_row]
            if by_row is not None:
                rows = inputs[by_row]
            elif run is not None and run.stop - run.start == out.rows:
                rows = [contents.run(row) for row in range(run.start, run.stop)]
            else:
                self._fault(f"nothing says what its {out.rows} rows are made of")
                return
            results = [contents.made(work, rank, row, wholes, number) for row in rows]
            self._write(out, results)
        self.calls.append(WorkCall(self._at, work, run, inputs, bool(outs)))

    def _add(self, instruction: Add) -> None:
        out, terms, _ = instruction
        rows = out.rows
        width = self._memory.width(out)
        parts = []
        for span, count in terms:
            if (span.rows, self._memory.width(span)) != (count * rows, width):
                self._fault(f"{span.buffer} is not {count} parts of the shape of the sum")
                return
            stack = self._read(span)
            parts += [stack[at * rows : (at + 1) * rows] for at in range(count)]
        first = terms[0][0]
        self._write(first, [NOTHING] * first.rows)
        self._write(out, [self._contents.sum(row) for row in zip(*parts, strict=True)])

    # ------------------------------------------------------------------ rows

    def _at_first(self, buffer: str, columns: Columns) -> list[int]:
        """The initial contents of a buffer's rows."""
        rows = range(self._memory.shapes[buffer][0])
        if buffer in self._scratch:
            return [NOTHING for _ in rows]
        return [self._contents.row(self._program.rank, buffer, row, columns) for row in rows]

    def _plane(self, span: Span) -> list[int]:
        """The contents of a buffer's rows in the columns of a span, to be changed in place."""
        planes = self._rows[span.buffer]
        columns = self._memory.columns(span)
        if columns not in planes:
            plane = self._at_first(span.buffer, columns)
            for other, rows in planes.items():
                if common(columns, other):
                    first = self._at_first(span.buffer, other)
                    changed = [row for row, content in enumerate(rows) if content != first[row]]
                    for row in changed:
                        plane[row] = NOTHING
            planes[columns] = plane
        return planes[columns]

    def _read(self, span: Span) -> list[int]:
        plane = self._plane(span)
        rows = [content for start, stop in span.runs() for content in plane[start:stop]]
        if NOTHING in rows:
            self._fault(f"it reads rows of {span.buffer} that hold nothing")
        return rows

    def _write(self, span: Span, found: Sequence[int]) -> None:
        """Set the contents of a span; invalidates rows of overlapping columns and scratch."""
        plane = self._plane(span)
        at = 0
        columns = self._memory.columns(span)
        for start, stop in span.runs():
            plane[start:stop] = found[at : at + stop - start]
            at += stop - start
            for other, rows in self._rows[span.buffer].items():
                if other != columns and common(columns, other):
                    rows[start:stop] = [NOTHING] * (stop - start)
        for buffer in self._memory.beside(span.buffer):
            for rows in self._rows[buffer].values():
                rows[:] = [NOTHING] * len(rows)
