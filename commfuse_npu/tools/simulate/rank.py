"""What one rank does, collective by collective and program by program, as launches.

A fused operation is its :class:`~commfuse_npu.plan.program.Program`, instruction by instruction,
the one that the transport runs.  What an instruction costs:

=========  ========================================================================================
``Post``   the host's ``post_overhead``, and a transfer on its lane, with a copy through the buffers
           of its communicator at both ends (read in HCCL); without ``batched`` each receive and
           each send
``Wait``   nothing, its host time is counted with the post; the work and the transfers that follow
           start when what it names is done
Compute    a launch, and what the operation says that this work takes
``Add``    memory traffic: ``ordered`` 3 blocks and a launch per addition, ``once`` one pass over
           all parts and one launch
``Copy``   a launch, and 2 bytes of memory traffic per byte
``Hold``   two events, with the ``Record`` of the one that it waits for
=========  ========================================================================================

A collective is a launch and four events: torch_npu records one behind the work before it, which the
group's stream waits for, and another behind the collective, which the work after it waits for (read
in ProcessGroupHCCL.cpp of torch_npu 2.7.1).  HCCL expands a collective once and finds it in a cache
from then on, so that no step pays for it; a batch is expanded each time, which is in
``post_overhead``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES, Machine
from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    End,
    Hold,
    Mark,
    Post,
    Record,
    Span,
    Wait,
    accesses,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.schedule import Place, Schedule
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Key, Message, Operation
from commfuse_npu.tools.simulate.variants import Variant, Way, direct

__all__ = ["EVENTS", "Ran", "Rank", "Width", "Work", "rest"]

Width = Callable[[Span], int]
"""How many columns a span has."""

Work = Callable[[Compute, Width], float]
"""Seconds of a program's work."""

_COLLECTIVE = "collective"
EVENTS = 4
"""Recorded or waited for, of a collective."""


def rest(steps: Iterator[None]) -> None:
    """Go on from where it is to the end."""
    for _ in steps:
        pass


class Ran(NamedTuple):
    """A program, and the bytes of its longest message."""

    program: Program
    message: float


class Rank:
    """Builds the launches of one rank.

    Args:
        members_per_node: ranks of the group in a node, ``size`` if it fits one.
        prefix: of the keys of its messages, where the launches of two of these are put together.

    Attributes:
        operations: what the host launches, in order.
        ran: the programs, by operation.
        ways: how operations were run, by name.
        either: the operations that can be run by collectives as well.
        sequence_parallel: whether it has a block of the rows outside of linear layers, else all.
    """

    def __init__(
        self,
        machine: Machine,
        rank: int,
        size: int,
        members_per_node: int,
        variant: Variant,
        prefix: str = "",
    ) -> None:
        self.machine, self.rank, self.size, self.variant = machine, rank, size, variant
        self.members_per_node = members_per_node
        self.operations: list[Operation] = []
        self.ran: dict[str, Ran] = {}
        self.ways: dict[str, Way] = {}
        self.either: set[str] = set()
        self.sequence_parallel = True
        self._prefix, self._prefixes = prefix, 0
        self._last: dict[str, int] = {}
        self._pending: dict[bool, set[int]] = {False: set(), True: set()}

    def add(self, one: Operation, after: Iterable[int]) -> int:
        """Launch an operation that waits for these; its index."""
        self.operations.append(one._replace(after=tuple(sorted(after))))
        return len(self.operations) - 1

    def compute(
        self,
        name: str,
        seconds: float,
        after: Iterable[int] = (),
        launches: int = 1,
        *,
        aside: bool = False,
        events: int = 0,
        posts: int = 0,
    ) -> None:
        """Work that needs what was received ``after``, and what :meth:`need` named."""
        waits, self._pending[aside] = self._pending[aside].union(after), set()
        engine = ASIDE if aside else COMPUTE
        work = Operation(name, engine, seconds, launches=launches, posts=posts, events=events)
        self._last[engine] = self.add(work, waits)

    def need(self, others: Iterable[int], *, aside: bool = False) -> None:
        """What follows on a stream needs these to be done."""
        self._pending[aside].update(others)

    def finish(self) -> list[Operation]:
        """End with waiting for what is left."""
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
        """Transfers on a lane; what is done when they are received, and when they are sent.

        As torch's process groups do, they start after all work that was launched before them.  The
        send and the receive of a step complete as a unit (HCCL), or a receive waits for no lane,
        and a send holds its lane until it is done (gloo).
        """
        needs = self._pending[False].union(after)
        if COMPUTE in self._last:
            needs.add(self._last[COMPUTE])
        host = launches, posts, events
        one = Operation(name, lane, 0.0, tuple(sends), tuple(receives), (), *host)
        if self.machine.batched:
            both = self.add(one, needs)
            return both, both
        received = sent = -1
        if receives:
            received = self.add(one._replace(engine=None, sends=()), needs)
        if sends:
            sent = self.add(one._replace(receives=()), needs)
        return received, sent

    def _key(self, name: str) -> Key:
        """The beginning of keys that no other operation of this rank uses; the same on all."""
        self._prefixes += 1
        return self._prefix + name, self._prefixes

    # ------------------------------------------------------------- plain collectives

    def collective(
        self, name: str, size: float, *, launches: int = 1, sums: bool = False
    ) -> tuple[int, ...]:
        """A block of so many bytes to every rank, and from every rank; returns what to wait for.

        Its own work (``sums``) is taken as free, HCCL adds while it copies, but for sums in an
        order on a mesh.
        """
        if self.size == 1 or self.variant.kind == "compute":
            return ()
        if sums:
            size *= self.machine.summed(self.size)
        key = self._key(name)
        schedule = direct(self.size, self.members_per_node)
        sends, receives = [], []
        for step, hop in enumerate(schedule.hops(self.rank, self.size, "first")):
            sends.append(Message((*key, step, self.rank), self.rank, hop.target, size))
            receives.append(Message((*key, step, hop.source), hop.source, self.rank, size))
        host = launches, 0, EVENTS * launches
        return self._exchange(name, _COLLECTIVE, sends, receives, (), *host)[:1]

    def pass_on(
        self, name: str, size: float, *, after: Iterable[int] = (), launches: int = 1
    ) -> tuple[int, ...]:
        """One round of a ring: so many bytes to the next rank, and from the one before."""
        key = self._key(name)
        up, down = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = Message((*key, self.rank), self.rank, up, size)
        receive = Message((*key, down), down, self.rank, size)
        host = launches, 0, EVENTS * launches
        return self._exchange(name, _COLLECTIVE, [send], [receive], after, *host)[:1]

    def elsewhere(self, name: str, seconds: float) -> tuple[int, ...]:
        """A collective of another group, which takes so long; returns what to wait for."""
        if seconds <= 0:
            return ()
        delay = seconds - self.machine.inside.latency
        message = Message((*self._key(name), self.rank), self.rank, self.rank, 0.0, delay)
        return self._exchange(name, _COLLECTIVE, [message], [message], (), 1, 0, EVENTS)[:1]

    # ------------------------------------------------------------- programs

    def way(self, operation: str) -> Way:
        """How an operation is run."""
        usual = dict(self.variant.chosen).get(operation, self.variant.way)
        return self.ways.setdefault(operation, usual)

    def place(self, operation: str, *, causal: bool = False) -> Place:
        """For whom a program is compiled.

        Args:
            causal: in the order for blocks of queries that cost differently.
        """
        schedule = self.way(operation)
        assert isinstance(schedule, Schedule)
        if causal:
            schedule = schedule.for_causal_blocks(self.size)
        return Place(schedule, self.rank, self.size, self.machine.batched)

    def run(
        self,
        operation: str,
        program: Program,
        columns: Mapping[str, int],
        works: Mapping[str, Work],
    ) -> None:
        """Run a program from its start to its end; see :meth:`begin`."""
        rest(self.begin(operation, program, columns, works))

    def begin(
        self,
        operation: str,
        program: Program,
        columns: Mapping[str, int],
        works: Mapping[str, Work],
    ) -> Iterator[None]:
        """Run a program, with a stop at its mark if it has one.

        Args:
            columns: of the buffers that the operation brings along.
            works: by name.
        """
        key = self._key(operation)
        widths = dict(columns)
        items = dict.fromkeys(columns, ITEM_BYTES)
        for scratch in program.scratch:
            widths[scratch.name] = scratch.columns
            wide = scratch.wide and self.variant.sums == "once"
            items[scratch.name] = SUM_BYTES if wide else ITEM_BYTES

        def width(span: Span) -> int:
            if span.columns is not None:
                return span.columns[1] - span.columns[0]
            return widths[span.buffer]

        def size(span: Span) -> float:
            return span.rows * width(span) * items[span.buffer]

        def message(end: End) -> Message:
            step, _, source, target, _ = end.transfer
            sent = size(end.span)
            delay = self.machine.buffered(sent)
            return Message((*key, step, source), source, target, sent, delay)

        carried = (span for post in program.posts for of in accesses(post) for span in of)
        self.ran[operation] = Ran(program, max(map(size, carried), default=0.0))
        received: dict[int, int] = {}
        sent: dict[int, int] = {}
        events: dict[int, int | None] = {}
        for one in program.code:
            if isinstance(one, Post | Collective):
                name, lane = f"{operation} {one.transfer.piece}", f"lane {one.transfer.lane}"
                away = [(way, end) for way, end in one.ends if not end.transfer.stays]
                sends = [message(end) for way, end in away if way == "send"]
                receives = [message(end) for way, end in away if way == "receive"]
                if isinstance(one, Post):
                    got, gone = self._exchange(name, lane, sends, receives, posts=1)
                else:
                    got, gone = self._exchange(name, lane, sends, receives, (), 1, 0, EVENTS)
                received |= {end.transfer.step: got for way, end in one.ends if way == "receive"}
                sent |= {end.transfer.step: gone for way, end in one.ends if way == "send"}
            elif isinstance(one, Wait):
                self.need((received[step] for step in one.receives), aside=one.aside)
                self.need((sent[step] for step in one.sends), aside=one.aside)
            elif isinstance(one, Compute):
                seconds = works[one.work](one, width)
                self.compute(f"{operation} {one.work}", seconds)
            elif isinstance(one, Mark):
                yield
            elif isinstance(one, Copy):
                seconds = self.machine.memory(2 * size(one.out))
                self.compute(f"{operation} copy", seconds, aside=one.aside)
            elif isinstance(one, Add):
                self._add(operation, one, size)
            elif isinstance(one, Record):
                events[one.event] = self._last.get(ASIDE if one.aside else COMPUTE)
            elif isinstance(one, Hold):
                event = events[one.event]
                self.need([] if event is None else [event], aside=one.aside)
                self.compute(f"{operation} hold", 0.0, launches=0, aside=one.aside, events=2)

    def _add(self, operation: str, one: Add, size: Callable[[Span], float]) -> None:
        additions, traffic = sum(parts for _, parts in one.terms) - 1, 3 * size(one.out)
        # A stack in one pass; what a collective brought is no stack in the order of its sum.
        if (self.variant.sums == "once" and len(one.terms) <= 2) or not additions:
            traffic = size(one.out) + sum(size(span) for span, _ in one.terms)
            additions = 1
        for _ in range(additions):
            seconds = self.machine.memory(traffic)
            self.compute(f"{operation} sum", seconds, aside=one.aside)
