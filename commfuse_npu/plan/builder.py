"""Puts programs together: a rule says what is posted, computed and added, the waits follow.

The waits of a program are where its data need them and nowhere else: before an instruction reads
rows that arrive, or writes rows that arrive or leave; and where one stream reads what the other
wrote, or writes what it used.

A stream knows that the other one is done by an event, or by a transfer that it waited for: that
began when the stream that posted it had come to it.  Of what comes before the program, or before
its mark, the side stream knows nothing; and everything on it is done when the program is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal

from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    End,
    Hold,
    Instruction,
    Mark,
    Post,
    Record,
    Span,
    Transfer,
    Wait,
    accesses,
    is_aside,
    overlap,
)
from commfuse_npu.plan.program import Program, Scratch
from commfuse_npu.plan.schedule import Hop, Own, Place, PlanError

__all__ = ["Builder"]

_SETTLE = Wait((), ())


class Builder:
    """A program under construction.

    Args:
        place: whose program it is, and by which schedule.

    Attributes:
        together: whether a chunk travels as one :meth:`collective`.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.size = place.rank, place.size
        self.together = place.together
        self._code: list[Instruction] = []
        self._scratch: dict[str, Scratch] = {}
        self._step = 0

    @property
    def peers(self) -> int:
        return self.size - 1

    def hops(self, own: Own) -> Sequence[Hop]:
        """The peers in the order in which they are dealt with."""
        return self.place.schedule.hops(self.rank, self.size, own)

    def runs(self, length: int, own: Own) -> list[slice]:
        """A block's rows, or a result's columns, in as many chunks as the schedule asks for."""
        return self.place.schedule.runs(length, own)

    def scratch(
        self, name: str, rows: int, columns: int, *, slot: str | None = None, wide: bool = False
    ) -> None:
        """Take scratch memory; buffers with one ``slot`` have it one after the other."""
        self._scratch[name] = Scratch(name, slot or name, rows, columns, wide)

    def post(
        self, hop: Hop, send: Span, receive: Span, piece: str, chunk: int = 0, chunks: int = 1
    ) -> None:
        """Send to the hop's target and receive from its source.

        Args:
            piece: what travels, with ``{source}`` and ``{target}`` for its ranks.
            chunk, chunks: which one it is of how many.
        """
        if self.together:
            raise PlanError(
                "the shape collective is of tensor-parallel linear layers only; choose shifted"
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
        """Send to every rank, and receive from every rank, as one.

        Args:
            piece, chunk, chunks: see :meth:`post`.
            own: whether the own block is among those of ``source`` and ``out``.
        """
        hops = [*self.hops("first"), *([Hop(self.rank, self.rank, 0)] if own else [])]
        pairs = [self._transfers(hop, piece, chunk, chunks) for hop in hops]
        sends = sorted((sent for sent, _ in pairs), key=lambda one: one.target)
        receives = sorted((received for _, received in pairs), key=lambda one: one.source)
        self._code.append(Collective(kind, source, out, tuple(sends), tuple(receives)))

    def all_gather(
        self, source: Span, out: Span, piece: str, chunk: int = 0, chunks: int = 1
    ) -> None:
        """Send ``source`` to every peer; ``out`` is a block per rank, in their order.

        The own block is filled by a collective alone.
        """
        if self.together:
            self.collective("all_gather", source, out, piece, chunk, chunks)
            return
        for hop in self.hops("first"):
            start = out.start + hop.source * source.rows
            theirs = Span(out.buffer, start, start + source.rows)
            self.post(hop, source, theirs, piece, chunk, chunks)

    def _transfers(
        self, hop: Hop, piece: str, chunk: int, chunks: int
    ) -> tuple[Transfer, Transfer]:
        """The next step's: to the hop's target and from its source."""
        step, self._step = self._step, self._step + 1
        number = "" if chunks == 1 else f" chunk {chunk}"

        def transfer(source: int, target: int) -> Transfer:
            name = piece.format(source=source, target=target)
            return Transfer(step, hop.lane, source, target, name + number)

        return transfer(self.rank, hop.target), transfer(hop.source, self.rank)

    def compute(
        self,
        work: str,
        outs: Sequence[Span] = (),
        ins: Sequence[Span] = (),
        run: slice | None = None,
    ) -> None:
        self._code.append(Compute(work, tuple(outs), tuple(ins), run))

    def add(self, out: Span, *terms: tuple[Span, int], aside: bool = False) -> None:
        """Sum; ``aside``: beside the work that comes after it, where there are streams."""
        self._code.append(Add(out, terms, aside and self.place.batched))

    def copy(self, out: Span, source: Span, *, aside: bool = False) -> None:
        """Copy; see :meth:`add`."""
        self._code.append(Copy(out, source, aside and self.place.batched))

    def mark(self) -> None:
        """Begun ahead of its work, a program runs as far as here."""
        self._code.append(Mark())

    def settle(self) -> None:
        """Wait for everything that is under way: nothing that comes after it can fail."""
        self._code.append(_SETTLE)

    def build(self, rule: tuple[Any, ...], names: tuple[str, ...]) -> Program:
        """The program; ``rule`` and ``names`` say what made it."""
        code = self._code if self.place.batched else self._receives_first()
        return Program(
            rule,
            names,
            self.rank,
            self.size,
            self.place.batched,
            tuple(self._in_order(code)),
            tuple(self._scratch.values()),
        )

    def _slot(self, buffer: str) -> str:
        scratch = self._scratch.get(buffer)
        return buffer if scratch is None else scratch.slot

    def _receives_first(self) -> list[Instruction]:
        """Every receive as soon as its rows are free.

        On gloo the notice that a receive is ready shares the socket with bulk data.
        """
        code: list[Instruction] = []
        # What came after the last receive, numbered; and which of it touched what.
        behind: deque[tuple[int, Instruction]] = deque()
        touched = _Touched(self._slot)
        marked = -1
        for at, one in enumerate(self._code):
            rest = one
            if isinstance(one, Post) and one.receive is not None:
                rest = Post(one.send, None)
                after = max(touched.take([one.receive.span]), default=-1)
                while behind and behind[0][0] <= max(after, marked):
                    code.append(behind.popleft()[1])
                code.append(Post(None, one.receive))
            behind.append((at, rest))
            if isinstance(one, Mark):
                marked = at
            touched.add(at, *chain(*accesses(rest)))
        return [*code, *(one for _, one in behind)]

    def _in_order(self, code: Sequence[Instruction]) -> list[Instruction]:
        """With waits, and events between two streams, wherever they are needed."""
        arriving, leaving = _Touched(self._slot), _Touched(self._slot)
        streams = {aside: _Stream(self._slot, aside) for aside in (False, True)}
        two = any(map(is_aside, code))
        posted: dict[tuple[str, int], tuple[int, Span]] = {}
        done: list[Instruction] = []
        # By the place in front of which they are recorded.
        events: dict[int, int] = {}
        for one in (*code, _SETTLE):
            reads, writes = accesses(one)
            stream, other = streams[is_aside(one)], streams[not is_aside(one)]
            every = one is _SETTLE
            received = arriving.take((*reads, *writes), every)
            sent = leaving.take(writes, every)
            if received or sent:
                if two:
                    arrived = [posted["receive", step] for step in received]
                    stream.waits(len(done), arrived, [posted["send", step] for step in sent])
                done.append(Wait(tuple(received), tuple(sent), stream.aside))
            if every:
                continue
            if two and stream.needs(other, reads, writes):
                done.append(Hold(events.setdefault(stream.known, len(events)), stream.aside))
            if isinstance(one, Post | Collective):
                for way, end in one.ends:
                    posted[way, end.transfer.step] = len(done), end.span
                    (leaving if way == "send" else arriving).add(end.transfer.step, end.span)
            elif two:
                stream.touches(len(done), reads, writes, isinstance(one, Mark))
            done.append(one)
        if streams[True].last >= streams[False].known:
            done.append(Hold(events.setdefault(streams[True].last + 1, len(events))))
        found: list[Instruction] = []
        for at, one in enumerate(done):
            if at in events:
                # Of the stream of what it comes after.
                found.append(Record(events[at], at > 0 and is_aside(done[at - 1])))
            found.append(one)
        return found


class _Stream:
    """One of the two streams, as far as the other one may have to wait for it.

    Attributes:
        known: before this place in the code it knows the other stream's instructions to be done.
        last: the place of its last instruction.
    """

    def __init__(self, slot: Callable[[str], str], aside: bool) -> None:
        self.aside = aside
        self.known, self.last = (-1, -1) if aside else (0, -1)
        self._read, self._written, self._marked = _Touched(slot), _Touched(slot), -1

    def touches(
        self, at: int, reads: Iterable[Span], writes: Iterable[Span], mark: bool = False
    ) -> None:
        """It was given an instruction."""
        self._read.add(at, *reads)
        self._written.add(at, *writes)
        self.last = at
        if mark:
            self._marked = at

    def waits(
        self, at: int, received: list[tuple[int, Span]], sent: list[tuple[int, Span]]
    ) -> None:
        """What arrives is written by the stream that waits for it."""
        if self.aside:
            self.known = max(self.known, *(posted + 1 for posted, _ in (*received, *sent)))
        self.touches(at, [span for _, span in sent], [span for _, span in received])

    def needs(self, other: _Stream, reads: Sequence[Span], writes: Sequence[Span]) -> bool:
        """Whether it has to hold for what the other one was given, which it then knows."""
        touched = other._written.take((*reads, *writes)) + other._read.take(writes)
        latest = max((*touched, other._marked))
        if latest < self.known and self.known >= 0:
            return False
        self.known = latest + 1
        return True


class _Touched:
    """Which instruction, or step, touched which memory."""

    def __init__(self, slot: Callable[[str], str]) -> None:
        self._slot = slot
        # By slot and buffer, in the order of first rows; and the rows that the widest one spans.
        self._spans: defaultdict[str, dict[str, list[tuple[int, int, Span]]]] = defaultdict(dict)
        self._widest = 0

    def add(self, number: int, *spans: Span) -> None:
        for span in spans:
            there = self._spans[self._slot(span.buffer)].setdefault(span.buffer, [])
            insort(there, (span.start, number, span))
            self._widest = max(self._widest, span.end - span.start)

    def take(self, touched: Sequence[Span], every: bool = False) -> list[int]:
        """Forget those that have memory in common with a span, or all; their numbers, in order."""
        taken = []
        for span in touched:
            slot = self._spans.get(self._slot(span.buffer), {})
            for buffer, there in list(slot.items()):
                # Other buffers of a slot are the same memory.
                low, high = 0, len(there)
                if buffer == span.buffer:
                    low = bisect_left(there, (span.start - self._widest,))
                    high = bisect_left(there, (span.end,))
                kept = []
                for one in there[low:high]:
                    if buffer == span.buffer and not overlap(span, one[2]):
                        kept.append(one)
                    else:
                        taken.append(one[1])
                there[low:high] = kept
                if not there:
                    del slot[buffer]
        if every:
            left = (there for slot in self._spans.values() for there in slot.values())
            taken += [number for there in left for _, number, _ in there]
            self._spans.clear()
        return sorted(taken)
