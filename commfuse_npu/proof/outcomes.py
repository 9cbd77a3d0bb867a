"""The expected results of a rule's programs: its lines, executed with symbolic contents.

A matrix is a function here: it maps a rank, a row and columns to the content of that row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from commfuse_npu.plan import RankSpec
from commfuse_npu.plan.instructions import Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import Piece
from commfuse_npu.proof.data_flow import Columns, Contents, Execution, WorkCall
from commfuse_npu.proof.memory import Shape

__all__ = ["Outcome", "outcome_faults", "outcome_of"]

_Call = tuple[slice | None, list[list[int]]]
"""The run of rows that a work is called with, and the contents of the rows of each input."""


class _Matrix(NamedTuple):
    """A symbolic matrix, ``[rows, columns]`` on every rank."""

    rows: int
    columns: int
    at: Callable[[int, int, Columns], int]
    """``(rank, row, columns)`` to the content of that row of the rank's matrix."""


class Outcome:
    """The expected results of a program: a :class:`~commfuse_npu.plan.rules.Carrier`.

    Attributes:
        shapes: of the operation's buffers.
        results: by output buffer, the expected content of ``(row, columns)``.
        calls: expected calls of ``make``, ``use`` and ``wgrad``, in order.
        first: a work, and the rows that its first call has to take, before any wait.
        last: a work, and the rows that its last call has to take.
    """

    def __init__(self, spec: RankSpec, contents: Contents) -> None:
        self.spec = spec
        self._contents = contents
        self.shapes: dict[str, Shape] = {}
        self.results: dict[str, Callable[[int, Columns], int]] = {}
        self.calls: dict[str, list[_Call]] = {}
        self.first: tuple[str, list[int]] | None = None
        self.last: tuple[str, list[int]] | None = None

    # ------------------------------------------------------------------ the lines

    def given(self, buffer: str, rows: int, columns: int) -> _Matrix:
        self.shapes[buffer] = rows, columns
        row = self._contents.row
        return _Matrix(rows, columns, lambda rank, i, part: row(rank, buffer, i, part))

    def _result(self, out: str | None, matrix: _Matrix) -> _Matrix:
        if out is not None:
            self.shapes[out] = matrix.rows, matrix.columns
            self.results[out] = lambda i, columns: matrix.at(self.spec.rank, i, columns)
        return matrix

    def own_block(self, whole: _Matrix) -> _Matrix:
        rows = whole.rows // self.spec.size
        return _Matrix(rows, whole.columns, lambda rank, i, on: whole.at(rank, rank * rows + i, on))

    def all_gather(self, shard: _Matrix, *, out: str | None = None) -> _Matrix:
        rows = shard.rows

        def at(_: int, i: int, columns: Columns) -> int:
            return shard.at(i // rows, i % rows, columns)

        return self._result(out, _Matrix(self.spec.size * rows, shard.columns, at))

    def all_to_all(self, blocks: _Matrix, *, out: str | None = None) -> _Matrix:
        rows = blocks.rows // self.spec.size

        def at(rank: int, i: int, columns: Columns) -> int:
            return blocks.at(i // rows, rank * rows + i % rows, columns)

        return self._result(out, blocks._replace(at=at))

    def reduce_scatter(self, whole: _Matrix, *, out: str, finish: bool = False) -> None:
        size = self.spec.size
        rows = whole.rows // self.spec.size
        contents = self._contents

        def at(rank: int, i: int, columns: Columns) -> int:
            block = range(rank * rows, (rank + 1) * rows)
            row = i if finish else block[i]
            if row not in block:
                return whole.at(rank, row, columns)
            if not finish or size == 1:
                return self._sum(rank, lambda q: whole.at(q, row, columns))
            own = contents.whole([whole.at(rank, k, columns) for k in block])
            partials = [whole.at(q, row, columns) for q in self._sources(rank)]
            return contents.made("finish", rank, contents.sum(partials), [own])

        self._result(out, _Matrix(whole.rows if finish else rows, whole.columns, at))

    def gemm(
        self,
        a: _Matrix,
        b: _Matrix,
        pieces: Sequence[Piece],
        *,
        out: str | None = None,
        first: slice | None = None,
        last: slice | None = None,
    ) -> _Matrix:
        contents = self._contents

        @cache
        def weight(rank: int, columns: Columns) -> int:
            return contents.whole([b.at(rank, k, columns) for k in range(b.rows)])

        def at(rank: int, i: int, columns: Columns) -> int:
            row = a.at(rank, i, (0, a.columns))
            return contents.made("gemm", rank, row, [weight(rank, columns)])

        if first is not None:
            self.first = "gemm", self._rows(a, first)
        if last is not None:
            self.last = "gemm", self._rows(a, last)
        return self._result(out, _Matrix(a.rows, b.columns, at))

    def make(self, rows: int, columns: int, pieces: Sequence[slice], *, out: str | None) -> _Matrix:
        contents = self._contents
        self.calls["make"] = [(run, []) for run in pieces]

        def at(rank: int, i: int, _: Columns) -> int:
            return contents.made("make", rank, contents.run(i))

        return self._result(out, _Matrix(rows, columns, at))

    def use(self, matrix: _Matrix, pieces: Sequence[slice], *, first: slice | None = None) -> None:
        rows = self._rows(matrix, slice(0, matrix.rows))
        self.calls["use"] = [(run, [rows[run]]) for run in pieces]
        if first is not None:
            self.first = "use", self._rows(matrix, first)

    def wgrad(self, *factors: _Matrix) -> None:
        rows = [self._rows(factor, slice(0, factor.rows)) for factor in factors]
        self.calls["wgrad"] = [(None, rows)]

    def _rows(self, matrix: _Matrix, run: slice) -> list[int]:
        all_columns = 0, matrix.columns
        return [matrix.at(self.spec.rank, i, all_columns) for i in range(run.start, run.stop)]

    def _sources(self, rank: int) -> list[int]:
        """The ranks whose partials ``rank`` adds before its own, in order."""
        spec = self.spec
        return [hop.source for hop in spec.schedule.hops(rank, spec.size, "last")]

    def _sum(self, rank: int, part: Callable[[int], int]) -> int:
        """The sum of ``part(q)`` over all ranks q, in the order in which ``rank`` adds."""
        return self._contents.sum([part(q) for q in (*self._sources(rank), rank)])


def outcome_of(program: Program, contents: Contents) -> Outcome:
    """The expected results of a program."""
    outcome = Outcome(program.spec, contents)
    program.rule.unfused(outcome)
    return outcome


# ---------------------------------------------------------------------- compared


def outcome_faults(
    program: Program, outcome: Outcome, actual: Execution, contents: Contents
) -> Iterator[str]:
    """The differences between the final contents and calls of a rank and the expected ones."""
    where = f"rank {program.rank}"
    written = actual.written()
    for buffer in sorted(written.keys() | outcome.results.keys()):
        rows, width = outcome.shapes[buffer]
        if not rows or not width:
            continue
        if buffer not in outcome.results:
            yield f"{where}: it changes {buffer}"
            continue
        initial = [contents.row(program.rank, buffer, row, (0, width)) for row in range(rows)]
        planes = sorted(written.get(buffer, {(0, width): initial}).items())
        covered = [columns for columns, _ in planes]
        if [a for a, _ in covered] + [width] != [0, *(b for _, b in covered)]:
            yield f"{where}: of {width} columns of {buffer} it writes {covered}"
            continue
        for columns, plane in planes:
            for row, content in enumerate(plane):
                expected = outcome.results[buffer](row, columns)
                if content != expected:
                    cells = f"{buffer}[{row}, {columns[0]}:{columns[1]}]"
                    yield f"{where}: {cells} {_difference(content, expected, contents)}"
                    break
    calls: defaultdict[str, list[WorkCall]] = defaultdict(list)
    for call in actual.calls:
        calls[call.work].append(call)
    unmade = {call.work for call in actual.calls if not call.makes}
    for work in sorted(unmade | outcome.calls.keys()):
        pairs = zip_longest(calls[work], outcome.calls.get(work, []))
        for at, (have, need) in enumerate(pairs):
            if have is None or need is None or (have.run, have.inputs) != need:
                took = "missing" if have is None else _call(have.run, have.inputs, contents)
                needed = "missing" if need is None else _call(need[0], need[1], contents)
                yield f"{where}: call {at} of {work} is {took}, it has to be {needed}"
                break
    for which, at, own in (("first", 0, outcome.first), ("last", -1, outcome.last)):
        if own is None or not calls[own[0]]:
            continue
        call = calls[own[0]][at]
        if call.inputs[0] != own[1]:
            yield (
                f"{where}: its {which} {own[0]} is not that of its own block: that transfer "
                "overlaps with no work"
            )
        elif which == "first" and any(isinstance(o, Wait) for o in program.code[: call.at]):
            yield f"{where}: it waits before the {own[0]} of its own block"


def _call(run: slice | None, inputs: list[list[int]], contents: Contents) -> str:
    rows = "" if run is None else f"for rows {run.start}:{run.stop}"
    taken = " and ".join(contents.words(contents.whole(matrix)) for matrix in inputs)
    return " with ".join(filter(None, (rows, taken))) or "without rows"


def _difference(actual: int, expected: int, contents: Contents) -> str:
    have = contents.parts(actual)
    need = contents.parts(expected)
    counts = Counter(have)
    needed = Counter(need)
    if len(need) == 1 or (len(have) == 1 and have[0] not in need):
        return f"is {contents.words(actual)}, it has to be {contents.words(expected)}"
    for part in needed - counts:
        return f"is a sum that lacks {contents.words(part)}"
    for part in counts - needed:
        return f"is a sum with {contents.words(part)} {counts[part]} times, not {needed[part]}"
    at = next(k for k, pair in enumerate(zip(have, need, strict=True)) if len(set(pair)) > 1)
    return (
        f"is a sum in another order: its part {at} is {contents.words(have[at])}, it has to be "
        f"{contents.words(need[at])}"
    )
