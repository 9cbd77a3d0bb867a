"""Instructions: what one rank posts, waits for, computes and adds, and the rows they work on.

The host issues instructions in order.  Sums and copies may be on a side stream of the
device, concurrent with the work on the first stream.  With a pair of :class:`RecordEvent` and
:class:`WaitEvent` one stream waits for the other.

A *buffer* is a matrix with a name: a tensor of the operation (``x``, ``weight``) or scratch memory
of the program.  A :class:`Span` is a run of rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = [
    "Add",
    "AheadEnd",
    "Collective",
    "Compute",
    "Copy",
    "End",
    "Instruction",
    "Post",
    "RecordEvent",
    "Span",
    "Transfer",
    "Wait",
    "WaitEvent",
    "accesses",
    "common",
    "line",
    "overlap",
    "uses_side_stream",
]


class Span(NamedTuple):
    """Rows ``start:stop`` of a buffer, and of them only ``columns`` (first, after the last) if set.

    ``times`` is the number of such runs of rows; each starts ``stride`` rows after the previous.
    """

    buffer: str
    start: int
    stop: int
    columns: tuple[int, int] | None = None
    times: int = 1
    stride: int = 0

    def __str__(self) -> str:
        columns = "" if self.columns is None else f", {self.columns[0]}:{self.columns[1]}"
        runs = "" if self.times == 1 else f" and {self.times - 1} more, {self.stride} apart"
        return f"{self.buffer}[{self.start}:{self.stop}{columns}{runs}]"

    @property
    def rows(self) -> int:
        return self.times * (self.stop - self.start)

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.stop + (self.times - 1) * self.stride

    def runs(self) -> list[tuple[int, int]]:
        """``(start, stop)`` of each run of rows."""
        return [
            (self.start + at * self.stride, self.stop + at * self.stride)
            for at in range(self.times)
        ]


class Transfer(NamedTuple):
    """One message; sender and receiver have an equal :class:`Transfer` in their programs.

    ``step`` and ``source`` identify it, with the same steps on every rank; ``source`` and
    ``target`` are ranks of the group; ``piece`` describes the data in error messages.
    """

    step: int
    lane: int
    source: int
    target: int
    piece: str

    @property
    def stays(self) -> bool:
        """Whether it uses no link: the rank's own block in a collective."""
        return self.source == self.target

    def __str__(self) -> str:
        return (
            f"{self.piece} from rank {self.source} to rank {self.target} "
            f"(step {self.step}, lane {self.lane})"
        )


class End(NamedTuple):
    """The send or the receive of a transfer, with the rows that it sends or fills."""

    transfer: Transfer
    span: Span


class Post(NamedTuple):
    """Post a send and a receive of the same step and lane as one batch."""

    send: End
    receive: End

    @property
    def ends(self) -> list[tuple[str, End]]:
        """``("send", end)`` and ``("receive", end)``."""
        return [("send", self.send), ("receive", self.receive)]

    @property
    def transfer(self) -> Transfer:
        """The transfer that it sends; its step is that of the post."""
        return self.send.transfer


class Collective(NamedTuple):
    """Post one collective, which stands for a transfer to and from every rank.

    Attributes:
        kind: an all-gather sends ``source`` to every rank; an all-to-all one block of it to each.
        source, out: blocks in the order of the target ranks, and of the source ranks.
        sends, receives: in the same order; both include this rank's own block, or neither does.
    """

    kind: Literal["all_gather", "all_to_all"]
    source: Span
    out: Span
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @property
    def ends(self) -> list[tuple[str, End]]:
        """The ends of all its transfers, in the order of their steps."""
        blocks = 1 if self.kind == "all_gather" else len(self.sends)
        sources = _blocks(self.source, blocks) * (len(self.sends) // blocks)
        ends = [("send", End(*pair)) for pair in zip(self.sends, sources, strict=True)]
        targets = _blocks(self.out, len(self.receives))
        ends += [("receive", End(*pair)) for pair in zip(self.receives, targets, strict=True)]
        return sorted(ends, key=lambda end: end[1].transfer.step)

    @property
    def transfer(self) -> Transfer:
        """The first transfer that it sends, which is its first step; all have the same lane."""
        return min(self.sends)


def _blocks(span: Span, count: int) -> list[Span]:
    """Cut a span into ``count`` equal runs of rows."""
    rows = span.rows // count
    starts = range(span.start, span.start + count * rows, rows) if rows else [span.start] * count
    return [Span(span.buffer, start, start + rows) for start in starts]


class Wait(NamedTuple):
    """Wait until the posts of these steps are complete, both what they send and what they receive.

    A collective has the number of its first step.
    """

    steps: tuple[int, ...]
    on_side_stream: bool = False


class Compute(NamedTuple):
    """Call a function of the operation: ``work(*outs, *ins)``, then the ``run`` of rows if set."""

    work: str
    outs: tuple[Span, ...]
    ins: tuple[Span, ...]
    run: slice | None = None


class Add(NamedTuple):
    """``out = sum of terms``, in this order.  A term ``(span, k)`` is a stack of k parts.

    The contents of the first term are lost, because kernels accumulate into it
    (:func:`~commfuse_npu.kernels.cpu.sum_parts`).
    """

    out: Span
    terms: tuple[tuple[Span, int], ...]
    on_side_stream: bool = False


class Copy(NamedTuple):
    """``out = source``, row by row; ``out`` may have several runs of rows."""

    out: Span
    source: Span
    on_side_stream: bool = False


class RecordEvent(NamedTuple):
    """Record an event on a stream: it completes when all work enqueued before it has."""

    event: int
    on_side_stream: bool = False


class WaitEvent(NamedTuple):
    """Make the stream wait for an event that the other stream recorded."""

    event: int
    on_side_stream: bool = False


class AheadEnd(NamedTuple):
    """Where a program stops when it is run ahead of its work."""


Instruction = Post | Collective | Wait | Compute | Add | Copy | RecordEvent | WaitEvent | AheadEnd


def uses_side_stream(instruction: Instruction) -> bool:
    """Whether an instruction runs on the side stream."""
    return bool(getattr(instruction, "on_side_stream", False))


def line(instruction: Instruction) -> str:
    """An instruction as one line of text."""
    match instruction:
        case Post((sent, _), (received, _)):
            text = (
                f"post step {sent.step}, lane {sent.lane}: {sent.piece} -> rank {sent.target}, "
                f"{received.piece} <- rank {received.source}"
            )
        case Collective(kind, source, out):
            numbers = sorted(transfer.step for transfer in instruction.receives)
            text = f"post steps {numbers[0]} to {numbers[-1]}, lane {instruction.transfer.lane}: "
            text += f"{out} = {kind}({source})"
        case Wait(steps):
            text = f"wait for step {', '.join(map(str, steps))}"
        case Compute(work, outs, ins, run):
            inputs = [*map(str, ins), *([] if run is None else [f"rows {run.start}:{run.stop}"])]
            text = f"{', '.join(map(str, outs))} = " if outs else ""
            text += f"{work}({', '.join(inputs)})"
        case Add(out, terms):
            parts = (f"{span} in {k} parts" if k > 1 else str(span) for span, k in terms)
            text = f"{out} = {' + '.join(parts)}"
        case Copy(out, source):
            text = f"{out} = {source}"
        case RecordEvent(event):
            text = f"record event {event}"
        case WaitEvent(event):
            text = f"wait for event {event}"
        case AheadEnd():
            text = "run ahead up to here"
    return f"side stream: {text}" if uses_side_stream(instruction) else text


def accesses(instruction: Instruction) -> tuple[Sequence[Span], Sequence[Span]]:
    """The spans that an instruction reads, and those that it writes."""
    match instruction:
        case Post(send, receive):
            return [send.span], [receive.span]
        case Compute():
            return instruction.ins, instruction.outs
        case Add(out, terms):
            return [span for span, _ in terms], [out, terms[0][0]]
        case Collective() | Copy():
            return [instruction.source], [instruction.out]
    return [], []


def overlap(one: Span, other: Span) -> bool:
    """Whether two spans of the same buffer have an element in common."""
    if one.columns and other.columns and not common(one.columns, other.columns):
        return False
    if one.times == other.times == 1:
        return one.start < other.stop and other.start < one.stop
    return any(common(a, b) for a in one.runs() for b in other.runs())


def common(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranges ``(first, after the last)`` intersect."""
    return one[0] < other[1] and other[0] < one[1]
