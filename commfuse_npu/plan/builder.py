"""Puts programs together: a rule says what is posted, computed and added, the waits follow.

The waits of a program are where its data need them and nowhere else: before an instruction reads
rows that arrive, or writes rows that arrive or leave; and where one stream reads what the other
wrote, or writes what it used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from commfuse_npu.plan.program import (
    Add,
    Compute,
    Copy,
    End,
    Instruction,
    Mark,
    Post,
    Program,
    Scratch,
    Span,
    Transfer,
    Wait,
    accesses,
    is_aside,
    overlap,
)
from commfuse_npu.plan.schedule import Hop, Own, Place
from commfuse_npu.plan.streams import with_events

__all__ = ["Builder"]

_SETTLE = Wait((), ())


class Builder:
    """A program under construction.

    Args:
        place: whose program it is, and by which schedule.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.size = place.rank, place.size
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
    ) -> str:
        """Take scratch memory; buffers with one ``slot`` have it one after the other."""
        self._scratch[name] = Scratch(name, slot or name, rows, columns, wide)
        return name

    def post(
        self, hop: Hop, send: Span, receive: Span, piece: str, chunk: int = 0, chunks: int = 1
    ) -> None:
        """Send to the hop's target and receive from its source.

        Args:
            piece: what travels, with ``{source}`` and ``{target}`` for its ranks.
            chunk, chunks: which one it is of how many.
        """
        step, self._step = self._step, self._step + 1
        number = "" if chunks == 1 else f" chunk {chunk}"

        def transfer(source: int, target: int) -> Transfer:
            name = piece.format(source=source, target=target)
            return Transfer(step, hop.lane, source, target, name + number)

        sent, received = transfer(self.rank, hop.target), transfer(hop.source, self.rank)
        self._code.append(Post(End(sent, send), End(received, receive)))

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
            tuple(with_events(self._with_waits(code), self._clash)),
            tuple(self._scratch.values()),
        )

    def _slot(self, span: Span) -> str:
        scratch = self._scratch.get(span.buffer)
        return span.buffer if scratch is None else scratch.slot

    def _receives_first(self) -> list[Instruction]:
        """Every receive as soon as its rows are free.

        On gloo the notice that a receive is ready shares the socket with bulk data.
        """
        code: list[Instruction] = []
        # What came after the last receive, numbered; and which of it touched a span last, by slot.
        behind: deque[tuple[int, Instruction]] = deque()
        touched: defaultdict[str, dict[Span, int]] = defaultdict(dict)
        marked = -1
        for at, one in enumerate(self._code):
            rest = one
            if isinstance(one, Post) and one.receive is not None:
                into, rest = one.receive.span, Post(one.send, None)
                there = touched[self._slot(into)].items()
                after = max((n for span, n in there if _clash(into, span)), default=-1)
                while behind and behind[0][0] <= max(after, marked):
                    number, passed = behind.popleft()
                    code.append(passed)
                    for span in chain(*accesses(passed)):
                        if touched[self._slot(span)].get(span) == number:
                            del touched[self._slot(span)][span]
                code.append(Post(None, one.receive))
            behind.append((at, rest))
            if isinstance(one, Mark):
                marked = at
            for span in chain(*accesses(rest)):
                touched[self._slot(span)][span] = at
        return [*code, *(one for _, one in behind)]

    def _with_waits(self, code: Sequence[Instruction]) -> list[Instruction]:
        found: list[Instruction] = []
        receives, sends = _UnderWay(self._slot), _UnderWay(self._slot)
        for one in (*code, _SETTLE):
            reads, writes = accesses(one)
            arrived, left = receives.take((*reads, *writes)), sends.take(writes)
            if one is _SETTLE:
                arrived, left = receives.take_all(), sends.take_all()
            if arrived or left:
                found.append(Wait(arrived, left, is_aside(one)))
            if one is not _SETTLE:
                found.append(one)
            if isinstance(one, Post):
                for way, end in one.ends:
                    (sends if way == "send" else receives).add(end)
        return found

    def _clash(self, one: Span, other: Span) -> bool:
        """Whether two spans are the same memory in part."""
        return self._slot(one) == self._slot(other) and _clash(one, other)


class _UnderWay:
    """Ends of transfers that were not waited for, by the slot of their memory."""

    def __init__(self, slot: Callable[[Span], str]) -> None:
        self._slot = slot
        # By slot and buffer, in the order of first rows; and the rows that the widest one spans.
        self._ends: defaultdict[str, dict[str, list[tuple[int, int, Span]]]] = defaultdict(dict)
        self._widest = 0

    def add(self, end: End) -> None:
        span = end.span
        there = self._ends[self._slot(span)].setdefault(span.buffer, [])
        insort(there, (span.start, end.transfer.step, span))
        self._widest = max(self._widest, _last_row(span) - span.start)

    def take(self, touched: Sequence[Span]) -> tuple[int, ...]:
        """The steps that have memory in common with a span."""
        taken = []
        for span in touched:
            slot = self._ends.get(self._slot(span), {})
            for buffer, there in list(slot.items()):
                low, high = 0, len(there)
                if buffer == span.buffer:
                    low = bisect_left(there, (span.start - self._widest,))
                    high = bisect_left(there, (_last_row(span),))
                found = [one for one in there[low:high] if _clash(span, one[2])]
                if found:
                    there[low:high] = [one for one in there[low:high] if not _clash(span, one[2])]
                    taken += [step for _, step, _ in found]
                    if not there:
                        del slot[buffer]
        return tuple(sorted(taken))

    def take_all(self) -> tuple[int, ...]:
        buffers = (there for slot in self._ends.values() for there in slot.values())
        taken = tuple(sorted(step for there in buffers for _, step, _ in there))
        self._ends.clear()
        return taken


def _last_row(span: Span) -> int:
    """The row after the last one of a span."""
    return span.stop + (span.times - 1) * span.stride


def _clash(one: Span, other: Span) -> bool:
    """Whether two spans of one slot are the same memory in part."""
    return one.buffer != other.buffer or overlap(one, other)
