"""The launches of one rank: collectives, and programs instruction by instruction.

A fused operation is the same :class:`~commfuse_npu.plan.program.Program` that the transport runs.
The cost of its instructions:

=============  =====================================================================================
``Post``       the host's ``post_overhead``, and a transfer on its lane, with a copy through the
               buffers of its communicator at both ends (read in HCCL); without ``batched`` for each
               receive and each send
``Wait``       nothing: its host time is part of the post; the work and the transfers that follow
               start when the transfers that it names are complete
Compute        a launch, and the seconds that the operation gives for this work
``Add``        memory traffic: 3 blocks and a launch per addition, ``rounded`` one pass over all
               parts and one launch
``Copy``       a launch, and 2 bytes of memory traffic per byte
``WaitEvent``  two events, including the ``RecordEvent`` that it waits for
=============  =====================================================================================

A collective is a launch and four events.  torch_npu records one event after the preceding work, for
which the group's stream waits, and another after the collective, for which the following work waits
(read in ProcessGroupHCCL.cpp of torch_npu 2.7.1).  HCCL expands a collective once and caches the
result, so no step pays for it; a batch is expanded each time, which is included in
``post_overhead``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.plan.instructions import (
    Add,
    AheadEnd,
    Collective,
    Compute,
    Copy,
    End,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
    uses_side_stream,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.schedule import RankSpec, Schedule
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Key, Message, Operation
from commfuse_npu.tools.simulate.links import Links
from commfuse_npu.tools.simulate.variants import Variant, Way, direct

__all__ = ["EVENTS", "RING", "Rank", "Width", "Work", "rest"]

Width = Callable[[Span], int]
"""Number of columns of a span."""

Work = Callable[[Compute, Width], float]
"""Seconds of a compute instruction."""

_COLLECTIVE = "collective"
EVENTS = 4
"""Events of a collective: recorded, or waited for by a stream."""
RING = "keys and values"
"""Name and lane of the passes of ring attention, which are no collectives."""


def rest(steps: Iterator[None]) -> None:
    """Run an iterator to its end."""
    for _ in steps:
        pass


class Rank:
    """Builds the launches of one rank.

    Args:
        links: of the group.
        prefix: of message keys, to distinguish two of these whose launches are merged.

    Attributes:
        operations: the host's launches, in order.
        ways: how each operation was run, by name.
        sequence_parallel: whether the rank has only a block of the rows outside of linear layers.
    """

    def __init__(self, links: Links, rank: int, variant: Variant, prefix: str = "") -> None:
        self.links, self.rank, self.variant = links, rank, variant
        self.machine, self.size = links.machine, links.size
        self.operations: list[Operation] = []
        self.ways: dict[str, Way] = {}
        self.sequence_parallel = True
        self._prefix, self._prefixes = prefix, 0
        self._last: dict[str, int] = {}
        self._pending: dict[bool, set[int]] = {False: set(), True: set()}

    def add(self, operation: Operation, after: Iterable[int]) -> int:
        """Append an operation that waits for those in ``after``; returns its index."""
        self.operations.append(operation._replace(after=tuple(sorted(after))))
        return len(self.operations) - 1

    def compute(
        self,
        name: str,
        seconds: float,
        after: Iterable[int] = (),
        launches: int = 1,
        *,
        on_side_stream: bool = False,
        events: int = 0,
        posts: int = 0,
    ) -> None:
        """Add work that waits for ``after`` and for the operations passed to :meth:`need`."""
        waits, self._pending[on_side_stream] = self._pending[on_side_stream].union(after), set()
        engine = ASIDE if on_side_stream else COMPUTE
        work = Operation(name, engine, seconds, launches=launches, posts=posts, events=events)
        self._last[engine] = self.add(work, waits)

    def need(self, operations: Iterable[int], *, on_side_stream: bool = False) -> None:
        """Make the next work on a stream wait for these operations."""
        self._pending[on_side_stream].update(operations)

    def finish(self) -> list[Operation]:
        """Add a final wait for pending operations, and return all operations."""
        if self._pending[False]:
            self.compute("end", 0.0, launches=0)
        return self.operations

    def _exchange(
        self,
        name: str,
        lane: str,
        sends: Sequence[Message],
        receives: Sequence[Message],
        after: Iterable[int] = (),
        launches: int = 0,
        posts: int = 0,
        events: int = 0,
    ) -> tuple[int, int]:
        """Add transfers on a lane; returns the operations that complete receives and sends.

        As with torch's process groups, they start after all work that was launched before them.
        With HCCL the send and the receive of a step complete together.  With gloo a receive does
        not occupy a lane, and a send occupies its lane until it completes.
        """
        needs = self._pending[False].union(after)
        if COMPUTE in self._last:
            needs.add(self._last[COMPUTE])
        host = launches, posts, events
        exchange = Operation(name, lane, 0.0, tuple(sends), tuple(receives), (), *host)
        if self.machine.batched:
            index = self.add(exchange, needs)
            return index, index
        received = sent = -1
        if receives:
            received = self.add(exchange._replace(engine=None, sends=()), needs)
        if sends:
            sent = self.add(exchange._replace(receives=()), needs)
        return received, sent

    def _key(self, name: str) -> Key:
        """A key prefix that no other operation of this rank uses; the same on all ranks."""
        self._prefixes += 1
        return self._prefix + name, self._prefixes

    # ------------------------------------------------------------- plain collectives

    def collective(
        self, name: str, size: float, *, launches: int = 1, sums: bool = False
    ) -> tuple[int, ...]:
        """Send a block of ``size`` bytes to every rank and receive one; returns what to wait for.

        The additions of a reduction (``sums``) are free, because HCCL adds while it copies, except
        for sums in a fixed order on a mesh.
        """
        if sums:
            size *= self.machine.summed(self.size)
        hops = direct(self.size, self.links.members_per_node).hops(self.rank, self.size, "first")
        ends = [(hop.target, hop.source) for hop in hops]
        return self._pass(name, _COLLECTIVE, size, ends, (), launches)

    def around(
        self, name: str, size: float, after: Iterable[int], launches: int
    ) -> tuple[int, ...]:
        """One round of a ring: send ``size`` bytes to the next rank, receive from the previous."""
        ends = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self._pass(name, _COLLECTIVE, size, [ends], after, launches)

    def elsewhere(self, name: str, seconds: float, launches: int = 1) -> tuple[int, ...]:
        """Collectives of another group that take ``seconds``; returns what to wait for."""
        return self._pass(name, _COLLECTIVE, seconds, [(self.rank, self.rank)], (), launches)

    def ring(self, seconds: float, after: Iterable[int]) -> tuple[int, ...]:
        """A pass of :data:`RING`, to a rank of another group; its host time is that of the work."""
        return self._pass(RING, RING, seconds, [(self.rank, self.rank)], after, 0)

    def _pass(
        self,
        name: str,
        lane: str,
        size: float,
        ends: Sequence[tuple[int, int]],
        after: Iterable[int],
        launches: int,
    ) -> tuple[int, ...]:
        """Send ``size`` bytes to the first rank of each pair and receive them from the second.

        To a rank itself: links carry a second of such a message in a second.
        """
        if not ends or size <= 0 or self.variant.kind == "compute":
            return ()
        key, me, sends, receives = self._key(name), self.rank, [], []
        for step, (target, source) in enumerate(ends):
            sends.append(Message((*key, step, me), me, target, size))
            receives.append(Message((*key, step, source), source, me, size))
        host = launches, 0, EVENTS * launches
        return self._exchange(name, lane, sends, receives, after, *host)[:1]

    # ------------------------------------------------------------- programs

    def way(self, operation: str) -> Way:
        """How an operation is run; recorded in ``ways``."""
        usual = dict(self.variant.chosen).get(operation, self.variant.way)
        return self.ways.setdefault(operation, usual)

    def spec(self, operation: str) -> RankSpec:
        """The schedule and the rank for which a program is compiled."""
        schedule = self.way(operation)
        assert isinstance(schedule, Schedule)
        return RankSpec(schedule, self.rank, self.size, self.machine.batched)

    def run(
        self,
        operation: str,
        program: Program,
        columns: Mapping[str, int],
        works: Mapping[str, Work],
    ) -> Iterator[None]:
        """Run a program; yields at its ``AheadEnd`` if it has one.

        Args:
            columns: of the buffers that the operation provides, by name.
            works: seconds of compute instructions, by name.
        """
        key = self._key(operation)
        widths = {**columns, **{scratch.name: scratch.columns for scratch in program.scratch}}

        def width(span: Span) -> int:
            if span.columns is not None:
                return span.columns[1] - span.columns[0]
            return widths[span.buffer]

        def size(span: Span) -> float:
            return float(span.rows * width(span) * ITEM_BYTES)

        def message(end: End) -> Message:
            step, _, source, target, _ = end.transfer
            sent = size(end.span)
            delay = self.machine.buffered(sent)
            return Message((*key, step, source), source, target, sent, delay)

        exchanged: dict[tuple[str, int], int] = {}
        events: dict[int, int | None] = {}
        for instruction in program.code:
            on_side = uses_side_stream(instruction)
            if isinstance(instruction, Post | Collective):
                transfer = instruction.transfer
                name, lane = f"{operation} {transfer.piece}", f"lane {transfer.lane}"
                away = [(way, end) for way, end in instruction.ends if not end.transfer.stays]
                sends = [message(end) for way, end in away if way == "send"]
                receives = [message(end) for way, end in away if way == "receive"]
                if isinstance(instruction, Post):
                    receive, send = self._exchange(name, lane, sends, receives, posts=1)
                else:
                    receive, send = self._exchange(name, lane, sends, receives, (), 1, 0, EVENTS)
                for way, end in instruction.ends:
                    exchanged[way, end.transfer.step] = receive if way == "receive" else send
            elif isinstance(instruction, Wait):
                ends = [("receive", step) for step in instruction.receives]
                ends += [("send", step) for step in instruction.sends]
                self.need((exchanged[end] for end in ends), on_side_stream=on_side)
            elif isinstance(instruction, Compute):
                seconds = works[instruction.work](instruction, width)
                self.compute(f"{operation} {instruction.work}", seconds)
            elif isinstance(instruction, AheadEnd):
                yield
            elif isinstance(instruction, Copy):
                seconds = self.machine.memory(2 * size(instruction.out))
                self.compute(f"{operation} copy", seconds, on_side_stream=on_side)
            elif isinstance(instruction, Add):
                self._add(operation, instruction, size)
            elif isinstance(instruction, RecordEvent):
                events[instruction.event] = self._last.get(ASIDE if on_side else COMPUTE)
            elif isinstance(instruction, WaitEvent):
                event = events[instruction.event]
                self.need([] if event is None else [event], on_side_stream=on_side)
                self.compute(f"{operation} hold", 0.0, launches=0, on_side_stream=on_side, events=2)

    def _add(self, operation: str, instruction: Add, size: Callable[[Span], float]) -> None:
        additions = sum(parts for _, parts in instruction.terms) - 1
        traffic = 3 * size(instruction.out)
        # Parts in one stack are added in one pass; those of a collective are no such stack.
        if (self.variant.rounded and len(instruction.terms) <= 2) or not additions:
            traffic = size(instruction.out) + sum(size(span) for span, _ in instruction.terms)
            additions = 1
        for _ in range(additions):
            seconds = self.machine.memory(traffic)
            self.compute(f"{operation} sum", seconds, on_side_stream=instruction.on_side_stream)
