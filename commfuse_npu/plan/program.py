"""Programs: what one rank posts, waits for, computes and adds, as a list of instructions.

A rule (:mod:`commfuse_npu.plan.rules`) compiles a schedule to a :class:`Program`, for one rank and
one set of shapes.  It is the only place that says what is posted when:
:mod:`commfuse_npu.runtime.executor` runs it, :mod:`commfuse_npu.proof.verify` proves the programs
of all ranks together, :mod:`commfuse_npu.tools.simulate` times them, and ``verify --log`` compares
a recorded run with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from commfuse_npu.plan.instructions import (
    AheadEnd,
    Collective,
    Instruction,
    Post,
    Span,
    accesses,
    line,
)
from commfuse_npu.plan.schedule import RankSpec

if TYPE_CHECKING:
    from commfuse_npu.plan.rules.rule import Rule

__all__ = ["Program", "Region", "Scratch", "aligned"]


class Scratch(NamedTuple):
    """A scratch buffer of a program, ``[rows, columns]``.

    Buffers with the same ``slot`` use the same memory one after the other.  A ``wide`` one has the
    dtype of sums.
    """

    name: str
    slot: str
    rows: int
    columns: int
    wide: bool = False


class Region(NamedTuple):
    """One of the arenas of scratch memory that a program takes.

    A ``wide`` one has the dtype of sums.  A ``late`` one is taken at ``ahead_end``, else at first.
    """

    wide: bool
    late: bool


_ALIGNMENT = 256
"""In elements, so that no two slots share a cache line or a vector unit's block of a device."""


def aligned(elements: int) -> int:
    """Round a number of elements up to the alignment of a slot."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def _named(code: Sequence[Instruction]) -> Iterator[Span]:
    """The spans that instructions read and write."""
    return (span for step in code for spans in accesses(step) for span in spans)


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of one rank for an operation.

    Attributes:
        rule: the operation, equal on ranks that run the same one.
        spec: rank, group size and schedule, for which it was compiled.
        code: the instructions in host order.
        scratch: the buffers that it needs besides the operation's tensors.
    """

    rule: Rule
    spec: RankSpec
    code: tuple[Instruction, ...]
    scratch: tuple[Scratch, ...] = field(default=())

    @property
    def rank(self) -> int:
        return self.spec.rank

    @property
    def size(self) -> int:
        return self.spec.size

    @cached_property
    def steps(self) -> int:
        """Number of steps, each a send and a receive."""
        return sum(way == "send" for post in self.posts for way, _ in post.ends)

    @property
    def posts(self) -> Iterator[Post | Collective]:
        """The instructions that post, in order."""
        return (post for post in self.code if isinstance(post, Post | Collective))

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """Every span that an instruction names, once, by buffer."""
        spans: dict[str, list[Span]] = {}
        for span in dict.fromkeys(_named(self.code)):
            spans.setdefault(span.buffer, []).append(span)
        return spans

    @cached_property
    def partitions(self) -> dict[str, tuple[list[Span], list[int], list[Span]]]:
        """By buffer: spans that cover it from row 0 on, the rows of each, and its other spans.

        One call makes all views of the first ones.
        """
        partitions = {}
        for buffer, spans in self.spans.items():
            shortest: dict[int, Span] = {}
            for span in spans:
                if span.columns is None and span.times == 1 and span.rows:
                    shortest[span.start] = min(span, shortest.get(span.start, span))
            row = 0
            parts = list[Span]()
            while row in shortest:
                parts.append(shortest[row])
                row = parts[-1].stop
            if len(parts) > 1:
                others = set(spans) - set(parts)
                partitions[buffer] = parts, [span.rows for span in parts], list(others)
        return partitions

    @cached_property
    def messages(self) -> frozenset[str]:
        """The buffers that transfers send from or receive into."""
        return frozenset(end.span.buffer for post in self.posts for _, end in post.ends)

    @cached_property
    def lanes(self) -> int:
        """Number of lanes that it uses."""
        return 1 + max((post.transfer.lane for post in self.posts), default=-1)

    @cached_property
    def ahead_end(self) -> int:
        """Index of the :class:`AheadEnd`, where a run ``ahead`` stops; without one, of the end."""
        ends = (at for at, end in enumerate(self.code) if isinstance(end, AheadEnd))
        return next(ends, len(self.code))

    @cached_property
    def last_post(self) -> int:
        """Index of the last instruction that posts; -1 if none does."""
        places = (at for at, post in enumerate(self.code) if isinstance(post, Post | Collective))
        return max(places, default=-1)

    @cached_property
    def layout(self) -> dict[str, tuple[Region, int, int, int]]:
        """``(region, offset in elements, rows, columns)`` of each scratch buffer."""
        ahead = {span.buffer for span in _named(self.code[: self.ahead_end])}
        early = {buffer.slot for buffer in self.scratch if buffer.name in ahead}
        slots = {
            buffer: (Region(buffer.wide, buffer.slot not in early), buffer.slot)
            for buffer in self.scratch
        }
        longest: Counter[tuple[Region, str]] = Counter()
        for buffer, key in slots.items():
            longest[key] = max(longest[key], buffer.rows * buffer.columns)
        offsets = {}
        ends = Counter[Region]()
        for (region, slot), elements in longest.items():
            offsets[region, slot] = ends[region]
            ends[region] += aligned(elements)
        return {
            buffer.name: (key[0], offsets[key], buffer.rows, buffer.columns)
            for buffer, key in slots.items()
        }

    @cached_property
    def regions(self) -> dict[Region, int]:
        """Number of elements of each region of scratch memory."""
        ends = Counter[Region]()
        for region, offset, rows, columns in self.layout.values():
            ends[region] = max(ends[region], offset + aligned(rows * columns))
        return dict(ends)

    def count(self, kind: type[Instruction], work: str | None = None) -> int:
        """Number of instructions of a kind; with ``work``, of calls of that work."""
        found = (step for step in self.code if isinstance(step, kind))
        return sum(work in (None, getattr(step, "work", None)) for step in found)

    def __str__(self) -> str:
        """The program as text, one line per instruction."""
        lines = (f"{place:>4}  {line(instruction)}" for place, instruction in enumerate(self.code))
        return "\n".join([f"{self.rule}, rank {self.rank} of {self.size}", *lines])
