"""Programs: what one rank posts, waits for, computes and adds, as a list of instructions.

A :class:`Program` is compiled from a schedule by a rule (:mod:`commfuse_npu.plan.rules`), for one
rank and one set of shapes, and read by everybody: :mod:`commfuse_npu.runtime.executor` runs it,
:mod:`commfuse_npu.proof.verify` proves it together with those of the other ranks,
:mod:`commfuse_npu.tools.simulate` times it, and a recorded run is compared with it.  None of them
knows a rule of its own about what is posted when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from commfuse_npu.plan.instructions import (
    Collective,
    Compute,
    Instruction,
    Mark,
    Post,
    Span,
    Transfer,
    accesses,
    line,
)

__all__ = ["Program", "Scratch", "Stretch", "aligned"]


class Scratch(NamedTuple):
    """A buffer of the program's own.

    Scratch in the same ``slot`` is the same memory, for one after the other; ``wide`` is in the
    dtype in which sums are made.
    """

    name: str
    slot: str
    rows: int
    columns: int
    wide: bool = False


class Stretch(NamedTuple):
    """Some of the scratch memory.

    ``wide`` is in the dtype of sums; ``late`` is lent from the mark on, else from the start.
    """

    wide: bool
    late: bool


_ALIGNMENT = 256
"""Elements: no slot shares a cache line, or a unit of a device's vectors, with another."""


def aligned(elements: int) -> int:
    """How many elements a slot for so many takes."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False)
class Program:
    """The part of one rank in an operation.

    Attributes:
        rule: name, schedule and arguments of what compiled it; equal on ranks that run the same.
        names: of the arguments.
        rank, size: place in the group, from 0.
        batched: whether a step's send and receive are posted as one (HCCL), or each receive as
            early as its rows are free (gloo).
        code: in order.
        scratch: what it needs besides the operation's tensors.
    """

    rule: tuple[Any, ...]
    names: tuple[str, ...]
    rank: int
    size: int
    batched: bool
    code: tuple[Instruction, ...]
    scratch: tuple[Scratch, ...] = field(default=())

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of its rule, by name."""
        return dict(zip(self.names, self.rule[2:], strict=True))

    @cached_property
    def transfers(self) -> dict[int, tuple[Transfer, Transfer]]:
        """The send and the receive of each step."""
        ends = [(way, end.transfer) for post in self.posts for way, end in post.ends]
        found = {(way, transfer.step): transfer for way, transfer in ends}
        steps = sorted(step for way, step in found if way == "send")
        return {step: (found["send", step], found["receive", step]) for step in steps}

    @property
    def posts(self) -> Iterator[Post | Collective]:
        return (one for one in self.code if isinstance(one, Post | Collective))

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """Every span that it names, once, by buffer."""
        found: dict[str, list[Span]] = {}
        named = (span for one in self.code for of in accesses(one) for span in of)
        for span in dict.fromkeys(named):
            found.setdefault(span.buffer, []).append(span)
        return found

    @cached_property
    def messages(self) -> frozenset[str]:
        """The buffers of which rows are sent, or in which they arrive."""
        return frozenset(end.span.buffer for post in self.posts for _, end in post.ends)

    @cached_property
    def lanes(self) -> int:
        """How many lanes it uses."""
        return 1 + max((send.lane for send, _ in self.transfers.values()), default=-1)

    @cached_property
    def mark(self) -> int:
        """Where it stops when it is begun ahead of its work; its end if it does not."""
        marks = (place for place, one in enumerate(self.code) if isinstance(one, Mark))
        return next(marks, len(self.code))

    @cached_property
    def last_post(self) -> int:
        """Place of the last instruction that posts, -1 for none."""
        places = (at for at, one in enumerate(self.code) if isinstance(one, Post | Collective))
        return max(places, default=-1)

    @cached_property
    def last_of(self) -> dict[str, int]:
        """Place of the last :class:`Compute` of each work."""
        return {one.work: at for at, one in enumerate(self.code) if isinstance(one, Compute)}

    @cached_property
    def layout(self) -> dict[str, tuple[Stretch, int, int, int]]:
        """``(stretch, offset, rows, columns)`` of each scratch buffer; the offset in elements."""
        ahead = {
            span.buffer for one in self.code[: self.mark] for of in accesses(one) for span in of
        }
        early = {one.slot for one in self.scratch if one.name in ahead}
        slots = {one: (Stretch(one.wide, one.slot not in early), one.slot) for one in self.scratch}
        longest: Counter[tuple[Stretch, str]] = Counter()
        for one, key in slots.items():
            longest[key] = max(longest[key], one.rows * one.columns)
        offsets, ends = {}, Counter[Stretch]()
        for (stretch, slot), elements in longest.items():
            offsets[stretch, slot] = ends[stretch]
            ends[stretch] += aligned(elements)
        return {one.name: (of[0], offsets[of], one.rows, one.columns) for one, of in slots.items()}

    @cached_property
    def stretches(self) -> dict[Stretch, int]:
        """How many elements of scratch memory it takes."""
        ends = Counter[Stretch]()
        for stretch, offset, rows, columns in self.layout.values():
            ends[stretch] = max(ends[stretch], offset + aligned(rows * columns))
        return dict(ends)

    @cached_property
    def late(self) -> bool:
        """Whether some scratch is lent from the mark on."""
        return any(stretch.late for stretch in self.stretches)

    def scratch_elements(self, wide: bool = False) -> int:
        """How many elements of scratch memory it takes."""
        return sum(n for stretch, n in self.stretches.items() if stretch.wide == wide)

    def count(self, kind: type[Instruction], work: str | None = None) -> int:
        """How many instructions of a kind there are; of one ``work`` of computes."""
        return sum(
            isinstance(one, kind) and (work is None or getattr(one, "work", None) == work)
            for one in self.code
        )

    def __str__(self) -> str:
        """The program as text, a line per instruction."""
        lines = (f"{place:>4}  {line(one)}" for place, one in enumerate(self.code))
        return "\n".join([f"{self.rule[0]}, rank {self.rank} of {self.size}", *lines])
