"""What has to come out of each rule's programs: the lines that it equals, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from commfuse_npu.plan import PlanError, Schedule
from commfuse_npu.plan.program import Program, Wait
from commfuse_npu.plan.rules import made_pieces, parts_of, swapped_pieces, used_pieces
from commfuse_npu.plan.schedule import Own, Place
from commfuse_npu.proof.data_flow import Call, Columns, Contents, Held
from commfuse_npu.proof.memory import Shape

__all__ = ["OUTCOMES", "Outcome", "outcome_faults", "outcome_of"]

Pair = tuple[int, ...]
"""Contents, or the numbers of rows, that work takes together."""


@dataclass
class Outcome:
    """What is known of a program's operation.

    Attributes:
        shapes: of the buffers that it brings along.
        results: what has to be in each row of those that it gets back, given the columns.
        taken: what work without results has to take: pairs of rows, each once; an empty one for
            a call that takes nothing.
        whole: such work that has to take all of them in this order, in one call.
        pieces: the runs of rows that work has to be called with, in order.
        first: work, and the rows that its first call has to take, before anything is waited for.
        last: work, and the rows that its last call has to take.
    """

    shapes: dict[str, Shape]
    results: dict[str, Callable[[int, Columns], int]] = field(default_factory=dict)
    taken: dict[str, list[Pair]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    pieces: dict[str, list[slice]] = field(default_factory=dict)
    first: tuple[str, list[int]] | None = None
    last: tuple[str, list[int]] | None = None


class _Known:
    """Names for what a rank of a group has."""

    def __init__(self, program: Program, contents: Contents) -> None:
        schedule = program.rule[1]
        assert isinstance(schedule, Schedule)
        self.schedule = schedule
        self.r, self.n = program.rank, program.size
        self.place = Place(schedule, self.r, self.n, program.batched)
        self.contents = contents
        self._weights: dict[tuple[int, int, Columns], int] = {}

    def row(self, rank: int, buffer: str, row: int, width: int) -> int:
        return self.contents.row(rank, buffer, row, (0, width))

    def rows(self, rank: int, buffer: str, rows: range, width: int) -> list[int]:
        return [self.row(rank, buffer, row, width) for row in rows]

    def gathered(self, buffer: str, rows: int, width: int) -> list[int]:
        """The rows of all ranks' buffers, one below the other."""
        return [self.row(p, buffer, i, width) for p in range(self.n) for i in range(rows)]

    def own(self, rows: int) -> range:
        return range(self.r * rows, (self.r + 1) * rows)

    def gemm(self, rank: int, row: int, inputs: int, columns: Columns) -> int:
        """A row times a rank's weight, or some columns of it."""
        key = rank, inputs, columns
        if key not in self._weights:
            weight = [self.contents.row(rank, "weight", k, columns) for k in range(inputs)]
            self._weights[key] = self.contents.whole(weight)
        return self.contents.made("gemm", rank, row, [self._weights[key]])

    def made(self, rank: int, row: int) -> int:
        return self.contents.made("make", rank, self.contents.run(row))

    def sources(self, rank: int) -> list[int]:
        """Whose partials a rank adds, in this order, before its own."""
        return [hop.source for hop in self.schedule.hops(rank, self.n, "last")]

    def sum(self, part: Callable[[int], int], rank: int | None = None) -> int:
        """The sum of what ``part`` says of each rank, as ``rank`` (this one) adds it."""
        rank = self.r if rank is None else rank
        return self.contents.sum([part(q) for q in (*self.sources(rank), rank)])


# ---------------------------------------------------------------------- one per rule


def _gather_gemm(
    of: _Known, rows: int, inputs: int, outputs: int, keep: bool, wgrad: str | None, other: int
) -> Outcome:
    n = of.n
    shapes = {"shard": (rows, inputs), "weight": (inputs, outputs)}
    shapes |= {"out": (n * rows, outputs)} if outputs else {}
    shapes |= {"whole": (n * rows, inputs)} if keep else {}
    shapes |= {"other": (n * rows, other)} if wgrad else {}
    whole = of.gathered("shard", rows, inputs)
    found = Outcome(shapes)
    if outputs:
        found.results["out"] = lambda i, columns: of.gemm(of.r, whole[i], inputs, columns)
    if keep:
        found.results["whole"] = lambda i, columns: whole[i]
    if wgrad:
        found.taken["wgrad"] = list(
            zip(whole, of.rows(of.r, "other", range(n * rows), other), strict=True)
        )
    if wgrad == "whole":
        found.whole.add("wgrad")
    if outputs or wgrad == "blocks":
        own = of.rows(of.r, "shard", range(rows), inputs)
        found.first = ("gemm" if outputs else "wgrad"), own
    return found


def _gemm_scatter(of: _Known, rows: int, inputs: int, outputs: int) -> Outcome:
    shapes = {
        "a": (of.n * rows, inputs), "weight": (inputs, outputs), "out": (rows, outputs)
    }  # fmt: skip
    return Outcome(
        shapes,
        results={"out": lambda i, on: _product_sum(of, "a", of.r * rows + i, inputs, on, of.r)},
        last=("gemm", of.rows(of.r, "a", of.own(rows), inputs)),
    )


def _product_sum(of: _Known, buffer: str, i: int, inputs: int, columns: Columns, adds: int) -> int:
    """Row i of the ranks' products, as rank ``adds`` sums it."""
    return of.sum(lambda q: of.gemm(q, of.row(q, buffer, i, inputs), inputs, columns), adds)


def _column_backward(
    of: _Known,
    rows: int,
    inputs: int,
    outputs: int,
    scatters: bool,
    gathers: bool,
    wgrad: bool,
) -> Outcome:
    n = of.n
    shapes = {"grad": (n * rows, outputs)}
    shapes |= {"weight": (outputs, inputs), "grad_x": (rows, inputs)} if scatters else {}
    shapes |= {"x": (rows, inputs)} if gathers else {"whole": (n * rows, inputs)}
    found = Outcome(shapes)
    if scatters:
        found.results["grad_x"] = lambda i, columns: _product_sum(
            of, "grad", of.r * rows + i, outputs, columns, of.r
        )
    if wgrad:
        grad = of.rows(of.r, "grad", range(n * rows), outputs)
        mine = of.rows(of.r, "whole", range(n * rows), inputs)
        whole = of.gathered("x", rows, inputs) if gathers else mine
        found.taken["wgrad"] = list(zip(grad, whole, strict=True))
        found.whole.add("wgrad")
    return found


def _gemm_all_reduce(of: _Known, rows: int, inputs: int, outputs: int) -> Outcome:
    parts = parts_of(of.place, rows)
    block = (parts[-1].stop - parts[-1].start) // of.n
    start = parts[-1].start + of.r * block
    # Which rank sums a row.
    adds = [
        q for part in parts for q in range(of.n) for _ in range((part.stop - part.start) // of.n)
    ]
    return Outcome(
        {"a": (rows, inputs), "weight": (inputs, outputs), "out": (rows, outputs)},
        results={"out": lambda i, columns: _product_sum(of, "a", i, inputs, columns, adds[i])},
        last=("gemm", of.rows(of.r, "a", range(start, start + block), inputs)),
    )


def _produce_scatter(of: _Known, rows: int, columns: int) -> Outcome:
    return Outcome(
        {"out": (rows, columns)},
        results={"out": lambda i, _: of.sum(lambda q: of.made(q, of.r * rows + i))},
        pieces={"make": made_pieces(of.place, rows)},
    )


def _gather_use(of: _Known, rows: int, columns: int, keep: bool) -> Outcome:
    whole = of.gathered("shard", rows, columns)
    found = Outcome({"shard": (rows, columns)})
    found.pieces["use"] = used_pieces(of.place, rows)
    found.taken["use"] = list(enumerate(whole))
    found.first = "use", of.rows(of.r, "shard", range(rows), columns)
    if keep:
        found.taken["wgrad"] = [(row,) for row in whole]
        found.whole.add("wgrad")
    return found


def _exchange(
    of: _Known, rows: int, columns: int, blocks: str, uses: bool, keep: bool, wgrad: bool
) -> Outcome:
    whole, makes = (of.n * rows, columns), blocks != "given"
    shapes = ({} if blocks == "made" else {"blocks": whole}) | ({"received": whole} if keep else {})
    found = Outcome(shapes)

    def got(i: int) -> int:
        source, there = i // rows, of.r * rows + i % rows
        return of.made(source, there) if makes else of.row(source, "blocks", there, columns)

    if makes:
        found.pieces["make"] = made_pieces(of.place, rows)
    if blocks == "made and kept":
        found.results["blocks"] = lambda i, _: of.made(of.r, i)
    if keep:
        found.results["received"] = lambda i, _: got(i)
    if wgrad:
        found.taken["wgrad"] = [()]
    if uses:
        own: Own = "last" if makes else "first"
        found.pieces["use"] = swapped_pieces(of.place, rows, own)
        found.taken["use"] = [(i, got(i)) for i in range(of.n * rows)]
    return found


def _sharded_forward(of: _Known, rows: int, columns: int) -> Outcome:
    return _gather_use(of, rows, columns, False)


def _sharded_backward(
    of: _Known, rows: int, columns: int, gathers: bool, scatters: bool
) -> Outcome:
    found = _gather_use(of, rows, columns, False) if gathers else Outcome({})
    if scatters:
        found.first = None
        found.shapes["out"] = rows, columns
        found.pieces["make"] = made_pieces(of.place, rows)
        found.results["out"] = _finished(of, rows, lambda q, i: of.made(q, i))
    return found


def _finished(
    of: _Known, rows: int, part: Callable[[int, int], int]
) -> Callable[[int, Columns], int]:
    """The rows of ``finish(total of the others, own)``."""
    own = of.contents.whole([part(of.r, i) for i in of.own(rows)])

    def row(i: int, columns: Columns) -> int:
        if of.n == 1:
            return part(0, i)
        total = of.contents.sum([part(q, of.r * rows + i) for q in of.sources(of.r)])
        return of.contents.made("finish", of.r, total, [own])

    return row


def _bucket_scatter(of: _Known, rows: int, stack: int, in_flight: int) -> Outcome:
    finished = _finished(of, rows, lambda q, i: of.row(q, "bucket", i, 1))

    def row(i: int, columns: Columns) -> int:
        mine = i in of.own(rows)
        return finished(i - of.r * rows, columns) if mine else of.row(of.r, "bucket", i, 1)

    return Outcome({"bucket": (of.n * rows, 1)}, results={"bucket": row})


def _bucket_gather(of: _Known, rows: int, last_first: bool) -> Outcome:
    return Outcome(
        {"bucket": (of.n * rows, 1)},
        results={"bucket": lambda i, _: of.row(i // rows, "bucket", i, 1)},
    )


OUTCOMES: dict[str, Callable[..., Outcome]] = {
    "gather_gemm": _gather_gemm,
    "gemm_scatter": _gemm_scatter,
    "column_backward": _column_backward,
    "gemm_all_reduce": _gemm_all_reduce,
    "produce_scatter": _produce_scatter,
    "gather_use": _gather_use,
    "exchange": _exchange,
    "sharded_forward": _sharded_forward,
    "sharded_backward": _sharded_backward,
    "bucket_scatter": _bucket_scatter,
    "bucket_gather": _bucket_gather,
}
"""By the name of the rule; its arguments follow."""


def outcome_of(program: Program, contents: Contents) -> Outcome:
    """What has to come out of a program.

    Raises:
        PlanError: nothing is known of its rule.
    """
    name, _, *arguments = program.rule
    if name not in OUTCOMES:
        raise PlanError(
            f"nothing says what has to come out of {name}; known are {', '.join(OUTCOMES)}"
        )
    return OUTCOMES[str(name)](_Known(program, contents), *arguments)


# ---------------------------------------------------------------------- held against it


def outcome_faults(
    program: Program, outcome: Outcome, held: Held, contents: Contents
) -> Iterator[str]:
    """Where what a rank has in the end is not what it has to be."""
    where = f"rank {program.rank}"
    for buffer in sorted(held.written.keys() | outcome.results.keys()):
        rows, width = outcome.shapes[buffer]
        if not rows or not width:
            continue
        as_it_was = [contents.row(program.rank, buffer, row, (0, width)) for row in range(rows)]
        planes = held.written.get(buffer) or {(0, width): as_it_was}
        if buffer not in outcome.results:
            yield f"{where}: it changes {buffer}"
            continue
        covered = sorted(planes)
        if [a for a, _ in covered] + [width] != [0, *(b for _, b in covered)]:
            yield f"{where}: of {width} columns of {buffer} it writes {covered}"
            continue
        for columns, got in sorted(planes.items()):
            for row, content in enumerate(got):
                due = outcome.results[buffer](row, columns)
                if content != due:
                    place = f"{buffer}[{row}, {columns[0]}:{columns[1]}]"
                    yield f"{where}: {place} {_difference(content, due, contents)}"
                    break
    yield from _work_faults(program, outcome, held.calls, contents)


def _difference(got: int, due: int, contents: Contents) -> str:
    have, need = contents.parts(got), contents.parts(due)
    counts, needed = Counter(have), Counter(need)
    if len(need) == 1 or (len(have) == 1 and have[0] not in need):
        return f"is {contents.words(got)}, it has to be {contents.words(due)}"
    for part in needed - counts:
        return f"is a sum that lacks {contents.words(part)}"
    for part in counts - needed:
        return f"is a sum with {contents.words(part)} {counts[part]} times, not {needed[part]}"
    at = next(k for k, pair in enumerate(zip(have, need, strict=True)) if len(set(pair)) > 1)
    return (
        f"is a sum in another order: its part {at} is {contents.words(have[at])}, it has to be "
        f"{contents.words(need[at])}"
    )


def _work_faults(
    program: Program, outcome: Outcome, calls: Sequence[Call], contents: Contents
) -> Iterator[str]:
    where = f"rank {program.rank}"
    by_work: dict[str, list[Call]] = {}
    for call in calls:
        by_work.setdefault(call.work, []).append(call)
    for work, pieces in outcome.pieces.items():
        runs = [call.run for call in by_work.get(work, ())]
        if runs != pieces:
            at = next(
                (k for k, (a, b) in enumerate(zip(runs, pieces, strict=False)) if a != b),
                min(len(runs), len(pieces)),
            )
            yield (
                f"{where}: call {at} of {work} is for rows {_run(runs, at)}, it has to be for "
                f"{_run(pieces, at)}"
            )
    for work in sorted(by_work.keys() | outcome.taken.keys()):
        calls_of = by_work.get(work, [])
        if work in outcome.taken or not all(call.makes for call in calls_of):
            yield from _taken_faults(where, work, calls_of, outcome, contents)
    for which, at, due in (("first", 0, outcome.first), ("last", -1, outcome.last)):
        if due is not None and by_work.get(due[0]):
            work, rows = due
            if by_work[work][at].taken[0] != rows:
                yield (
                    f"{where}: its {which} {work} is not that of its own block: that transfer has "
                    "nothing to hide behind"
                )
            elif which == "first" and _waits_before(program, by_work[work][0].at):
                yield f"{where}: it waits before the {work} of its own block"


def _waits_before(program: Program, at: int) -> bool:
    return any(isinstance(one, Wait) for one in program.code[:at])


def _run(runs: Sequence[slice | None], at: int) -> str:
    run = runs[at] if at < len(runs) else None
    return "none" if run is None else f"{run.start}:{run.stop}"


def _taken_faults(
    where: str, work: str, calls: Sequence[Call], outcome: Outcome, contents: Contents
) -> Iterator[str]:
    got: list[Pair] = []
    for call in calls:
        taken: list[Sequence[int]] = list(call.taken)
        if call.run is not None:
            taken.insert(0, range(call.run.start, call.run.stop))
        if len({len(rows) for rows in taken}) > 1:
            yield f"{where}: {work} takes {' and '.join(str(len(rows)) for rows in taken)} rows"
            return
        got += zip(*taken, strict=True) if taken else [()]
    due = outcome.taken.get(work, [])
    if work in outcome.whole and len(calls) > 1:
        yield f"{where}: {work} takes the whole in {len(calls)} pieces"
    if got == due:
        return
    counts, needed = Counter(got), Counter(due)
    for pair in needed - counts:
        yield f"{where}: {work} never takes {_pair(pair, contents, work)}"
    for pair in counts - needed:
        times = f"{counts[pair]} times instead of {needed[pair]}"
        yield f"{where}: {work} takes {_pair(pair, contents, work)} {times}"
    if counts == needed and work in outcome.whole:
        yield f"{where}: {work} takes the rows of the whole in another order"


def _pair(pair: Pair, contents: Contents, work: str) -> str:
    if work == "use":
        return f"{contents.words(pair[1])} as row {pair[0]}"
    return " with ".join(contents.words(one) for one in pair) or "nothing"
