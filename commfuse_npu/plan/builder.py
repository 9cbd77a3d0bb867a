"""Builds programs: a rule says what is posted, computed and added; the builder inserts the waits.

A program waits only where its data require it: before an instruction reads rows that arrive, or
writes rows that arrive or leave; and where one stream reads rows that the other wrote, or writes
rows that the other used.

Two things order a stream after work of the other one: an event, or a wait for a transfer, which
starts after the work before its post.  The side stream is not ordered after work before the program
or before its :class:`AheadEnd`, so it waits for an event first.  At the end the first stream waits
for the side stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Literal

from commfuse_npu.plan.instructions import (
    Add,
    AheadEnd,
    Collective,
    Compute,
    Copy,
    End,
    Instruction,
    Post,
    RecordEvent,
    Span,
    Transfer,
    Wait,
    WaitEvent,
    accesses,
    overlap,
    uses_side_stream,
)
from commfuse_npu.plan.program import Program, Scratch
from commfuse_npu.plan.schedule import Hop, Own, PlanError, RankSpec

if TYPE_CHECKING:
    from commfuse_npu.plan.rules.rule import Rule

__all__ = ["Builder"]

_SETTLE = Wait(())


class Builder:
    """A program under construction.

    Args:
        spec: the rank that runs the program, and the schedule.

    Attributes:
        as_collective: whether the schedule posts a chunk as one :meth:`collective`.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.as_collective = spec.as_collective
        self._code: list[Instruction] = []
        self._scratch: dict[str, Scratch] = {}
        self._step = 0

    @property
    def peers(self) -> int:
        return self.size - 1

    def hops(self, own: Own) -> Sequence[Hop]:
        """The peers in the order of the schedule."""
        return self.spec.schedule.hops(self.rank, self.size, own)

    def runs(self, length: int) -> list[slice]:
        """Split a block's rows, or a result's columns, into the schedule's number of chunks."""
        return self.spec.schedule.runs(length)

    def scratch(
        self, name: str, rows: int, columns: int, *, slot: str | None = None, wide: bool = False
    ) -> None:
        """Declare a scratch buffer; those with the same ``slot`` share memory, one at a time."""
        self._scratch[name] = Scratch(name, slot or name, rows, columns, wide)

    def post(
        self, hop: Hop, send: Span, receive: Span, piece: str, chunk: int = 0, chunks: int = 1
    ) -> None:
        """Send to the hop's target and receive from its source.

        Args:
            piece: a description of the data, with ``{source}`` and ``{target}`` for the ranks.
            chunk, chunks: index of the chunk, and their number.

        Raises:
            PlanError: the shape of the schedule is ``collective``.
        """
        if self.as_collective:
            raise PlanError(
                "the shape collective is for tensor-parallel linear layers only; choose shifted"
            )
        sent, received = self._transfers(hop, piece, chunk, chunks)
        self._code.append(Post(End(sent, send), End(received, receive)))

    def collective(
        self,
        kind: Literal["all_gather", "all_to_all"],
        source: Span,
        out: Span,
        piece: str,
        chunk: int = 0,
        chunks: int = 1,
        *,
        own: bool = True,
    ) -> None:
        """Send to every rank and receive from every rank with one collective.

        Args:
            piece, chunk, chunks: see :meth:`post`.
            own: whether ``source`` and ``out`` include this rank's own block.
        """
        hops = [*self.hops("first"), *([Hop(self.rank, self.rank, 0)] if own else [])]
        pairs = [self._transfers(hop, piece, chunk, chunks) for hop in hops]
        sends = sorted((sent for sent, _ in pairs), key=lambda transfer: transfer.target)
        receives = sorted((received for _, received in pairs), key=lambda transfer: transfer.source)
        self._code.append(Collective(kind, source, out, tuple(sends), tuple(receives)))

    def all_gather(self, source: Span, out: Span, piece: str) -> None:
        """Send ``source`` to every peer; ``out`` has one block per rank, in rank order.

        Only a collective fills the own block of ``out``.
        """
        if self.as_collective:
            self.collective("all_gather", source, out, piece)
            return
        for hop in self.hops("first"):
            start = out.start + hop.source * source.rows
            block = Span(out.buffer, start, start + source.rows)
            self.post(hop, source, block, piece)

    def _transfers(
        self, hop: Hop, piece: str, chunk: int, chunks: int
    ) -> tuple[Transfer, Transfer]:
        """The two transfers of the next step: to the hop's target and from its source."""
        step = self._step
        self._step += 1
        label = piece if chunks == 1 else f"{piece} chunk {chunk}"
        sent = _transfer(step, hop.lane, self.rank, hop.target, label)
        return sent, _transfer(step, hop.lane, hop.source, self.rank, label)

    def compute(
        self,
        work: str,
        outs: Sequence[Span] = (),
        ins: Sequence[Span] = (),
        run: slice | None = None,
    ) -> None:
        """Call a work of the operation; see :class:`Compute`."""
        self._code.append(Compute(work, tuple(outs), tuple(ins), run))

    def add(self, out: Span, *terms: tuple[Span, int], on_side_stream: bool = False) -> None:
        """``out`` = sum of the terms; ``on_side_stream``: on devices that have one."""
        self._code.append(Add(out, terms, on_side_stream))

    def copy(self, out: Span, source: Span, *, on_side_stream: bool = False) -> None:
        """``out = source``; ``on_side_stream``: see :meth:`add`."""
        self._code.append(Copy(out, source, on_side_stream))

    def end_ahead(self) -> None:
        """Set the point up to which the program runs ahead of its work."""
        self._code.append(AheadEnd())

    def settle(self) -> None:
        """Wait for all transfers in flight, so that no later instruction can fail."""
        self._code.append(_SETTLE)

    def build(self, rule: Rule) -> Program:
        """Return the program of a rule."""
        return Program(rule, self.spec, tuple(self._in_order()), tuple(self._scratch.values()))

    def _in_order(self) -> list[Instruction]:
        """Insert waits, and events between the two streams, where they are needed.

        A piece that arrives in step 0 is multiplied, and copied for the weight gradient.  The side
        stream needs it first and waits for it; events order the two streams::

            first  | gemm own |                | event 0, gemm of the piece | event 1, wgrad |
            side   |          | wait, event 0  | copy of the piece, event 1 |
            links  | step 0                    |
        """
        slots = {buffer.name: buffer.slot for buffer in self._scratch.values()}
        links, first, side = (_Pending(slots, known) for known in (0, 0, -1))
        two_streams = any(map(uses_side_stream, self._code))
        ordered: list[Instruction] = []
        # By step: the place of its post; and by stream, of the wait for it.
        posts: dict[int, int] = {}
        waits: dict[tuple[int, bool], int] = {}
        events: dict[int, int] = {}
        for instruction in (*self._code, _SETTLE):
            reads, writes = accesses(instruction)
            on_side = uses_side_stream(instruction)
            stream, other = (side, first) if on_side else (first, side)
            arrived, left = links.conflicts(reads, writes, every=instruction is _SETTLE)
            steps = {step for step, _ in (*arrived, *left) if (step, on_side) not in waits}
            if steps:
                waits |= {(step, on_side): len(ordered) for step in steps}
                ordered.append(Wait(tuple(sorted(steps)), on_side))
                if on_side:
                    stream.known = max(stream.known, *(posts[step] + 1 for step in steps))
            if instruction is _SETTLE:
                continue
            if two_streams:
                # Arriving rows count as written by the stream that waits for them.
                for step, span in arrived:
                    stream.add(waits[step, on_side], [], [span])
                for step, span in left:
                    stream.add(waits[step, on_side], [span], [])
                before = chain(*other.conflicts(reads, writes))
                latest = max([other.ahead_end, *(at for at, _ in before)])
                if latest >= stream.known:
                    stream.known = latest + 1
                    event = events.setdefault(stream.known, len(events))
                    ordered.append(WaitEvent(event, on_side))
            if isinstance(instruction, Post | Collective):
                step = instruction.transfer.step
                posts[step] = len(ordered)
                links.add(step, reads, writes)
            elif two_streams:
                stream.add(len(ordered), reads, writes)
                if isinstance(instruction, AheadEnd):
                    stream.ahead_end = len(ordered)
            ordered.append(instruction)
        if side.last >= first.known:
            ordered.append(WaitEvent(events.setdefault(side.last + 1, len(events))))
        return _recorded(ordered, events)


def _recorded(code: Sequence[Instruction], events: Mapping[int, int]) -> list[Instruction]:
    """The code with a :class:`RecordEvent` on the stream of the instruction before it.

    Args:
        events: the number of the event by the index of the instruction before which it is recorded.
    """
    recorded: list[Instruction] = []
    for at, instruction in enumerate(code):
        if at in events:
            recorded.append(RecordEvent(events[at], at > 0 and uses_side_stream(code[at - 1])))
        recorded.append(instruction)
    return recorded


@lru_cache(maxsize=1 << 14)
def _transfer(step: int, lane: int, source: int, target: int, label: str) -> Transfer:
    """A transfer, which programs of all lengths share; ``label`` as ``piece`` of a post."""
    return Transfer(step, lane, source, target, label.format(source=source, target=target))


class _Pending:
    """The rows that the links, or a stream, may still access.

    Attributes:
        known: a stream is ordered after all instructions of the other one before this index.
        last, ahead_end: index of a stream's last instruction, and of its :class:`AheadEnd`.
    """

    def __init__(self, slots: Mapping[str, str], known: int) -> None:
        self._read = _Touched(slots)
        self._written = _Touched(slots)
        self.known = known
        self.last = -1
        self.ahead_end = -1

    def add(self, number: int, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        """Add the accesses of an instruction, or of a transfer with this step."""
        self._read.add(number, *reads)
        self._written.add(number, *writes)
        self.last = max(self.last, number)

    def conflicts(
        self, reads: Sequence[Span], writes: Sequence[Span], every: bool = False
    ) -> tuple[list[Numbered], list[Numbered]]:
        """Remove and return the writes and the reads that must come before."""
        written = self._written.take((*reads, *writes), every)
        return written, self._read.take(writes, every)


Numbered = tuple[int, Span]
"""A span of memory, after the number of the instruction, or step, that accesses it."""


class _Touched:
    """Numbered spans."""

    def __init__(self, slots: Mapping[str, str]) -> None:
        self._slots = slots
        # By slot and buffer, sorted by first row; and the most rows that a span extends over.
        self._spans: defaultdict[str, dict[str, list[tuple[int, int, Span]]]] = defaultdict(dict)
        self._widest = 0

    def add(self, number: int, *spans: Span) -> None:
        for span in spans:
            buffer = span.buffer
            entries = self._spans[self._slots.get(buffer, buffer)].setdefault(buffer, [])
            insort(entries, (span.start, number, span))
            self._widest = max(self._widest, span.end - span.start)

    def take(self, touched: Sequence[Span], every: bool = False) -> list[Numbered]:
        """Remove and return the spans that overlap ``touched``, or all."""
        taken = list[Numbered]()
        for span in touched:
            slot = self._spans.get(self._slots.get(span.buffer, span.buffer))
            if not slot:
                continue
            for buffer, entries in list(slot.items()):
                # All spans of another buffer in the slot overlap: it is the same memory.
                low = 0
                high = len(entries)
                if buffer == span.buffer:
                    low = bisect_left(entries, (span.start - self._widest,))
                    high = bisect_left(entries, (span.end,))
                apart = []
                for entry in entries[low:high]:
                    if buffer == span.buffer and not overlap(span, entry[2]):
                        apart.append(entry)
                    else:
                        taken.append(entry[1:])
                entries[low:high] = apart
                if not entries:
                    del slot[buffer]
        if every:
            remaining = (entries for slot in self._spans.values() for entries in slot.values())
            taken += [entry[1:] for entries in remaining for entry in entries]
            self._spans.clear()
        return taken
