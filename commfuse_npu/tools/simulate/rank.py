"""The launches of one rank: collectives, and programs instruction by instruction; of a group.

A fused operation is the same :class:`~commfuse_npu.plan.program.Program` that the transport runs.
The cost of its instructions:

=============  =====================================================================================
``Post``       the host's ``post_overhead``, and a transfer on its lane, with a copy through the
               buffers of its communicator at both ends (read in HCCL)
``Wait``       nothing: its host time is part of the post; the work and the transfers that follow
               start when the transfers that it names are complete
Compute        a launch, and the seconds of its GEMM
``Add``        memory traffic: 3 blocks and a launch per addition
``Copy``       a launch, and 2 bytes of memory traffic per byte
``WaitEvent``  two events, including the ``RecordEvent`` that it waits for
=============  =====================================================================================

A collective is a launch and four events.  torch_npu records one event after the preceding work, for
which the group's stream waits, and another after the collective, for which the following work waits
(read in ProcessGroupHCCL.cpp of torch_npu 2.7.1).  HCCL expands a collective once and caches the
result, so no step pays for it; a batch is expanded each time, which is included in
``post_overhead``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count

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
from commfuse_npu.plan.rules import ColumnBackward
from commfuse_npu.plan.rules.rule import Rule
from commfuse_npu.plan.schedule import RankSpec, Schedule
from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.engine import (
    COMPUTE,
    SIDE_STREAM,
    Key,
    Links,
    Message,
    Operation,
    Simulated,
    fold,
)
from commfuse_npu.tools.simulate.lora import Lora
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant, Way

_COLLECTIVE = "collective"
EVENTS = 4
"""Events of a collective: recorded, or waited for by a stream."""
RING = "keys and values"
"""Name and lane of the passes of ring attention, which are no collectives."""


def rest(steps: Iterator[object]) -> None:
    """Run an iterator to its end."""
    for _ in steps:
        pass


class Rank:
    """Builds the launches of one rank.

    Args:
        links: of the group.
        keys: numbers of messages, shared by those whose launches are merged.

    Attributes:
        operations: the host's launches, in order.
        ways: how each operation was run, by name.
        sequence_parallel: whether the rank has only a block of the rows outside of linear layers.
        lora: adapters, if the other weights are frozen.
        free: groups whose transfers are left out: ``tp``, ``cp``, ``ep``.
    """

    def __init__(
        self, links: Links, rank: int, variant: Variant, keys: Iterator[int] | None = None
    ) -> None:
        self.links = links
        self.rank = rank
        self.variant = variant
        self.machine = links.machine
        self.size = links.size
        self.operations: list[Operation] = []
        self.ways: dict[str, Way] = {}
        self.sequence_parallel = True
        self.lora: Lora | None = None
        self.free: tuple[str, ...] = ()
        self.keys = keys or count()
        self._last: dict[str, int] = {}
        self._pending: dict[str, set[int]] = {COMPUTE: set(), SIDE_STREAM: set()}

    def add(self, operation: Operation, after: Iterable[int]) -> int:
        """Append an operation that waits for those in ``after``; returns its index."""
        self.operations.append(operation._replace(after=tuple(sorted(after))))
        return len(self.operations) - 1

    def repeat(self, operation: Operation, after: Iterable[int]) -> int:
        """Append an operation of another rank's list; as any, a transfer follows earlier work."""
        needs = set(after)
        if operation.engine == COMPUTE:
            self._last[COMPUTE] = len(self.operations)
        elif COMPUTE in self._last:
            needs.add(self._last[COMPUTE])
        return self.add(operation, needs)

    def compute(
        self,
        name: str,
        seconds: float,
        after: Iterable[int] = (),
        launches: float = 1,
        *,
        engine: str = COMPUTE,
        events: int = 0,
        posts: int = 0,
    ) -> None:
        """Add work that waits for ``after`` and for the operations passed to :meth:`need`."""
        waits, self._pending[engine] = self._pending[engine].union(after), set()
        work = Operation(name, engine, seconds, launches=launches, posts=posts, events=events)
        self._last[engine] = self.add(work, waits)

    def gemm(
        self,
        name: str,
        rows: float,
        inner: float,
        outer: float,
        after: Iterable[int] = (),
        launches: float = 1,
    ) -> None:
        """Add ``[rows, inner] @ [inner, outer]``."""
        self.compute(name, self.machine.gemm(rows, inner, outer), after, launches)

    def elementwise(self, name: str, elements: float, launches: float = 1) -> None:
        """Add work that reads and writes so many elements in all."""
        self.compute(name, self.machine.memory(elements * ITEM_BYTES), launches=launches)

    def need(self, operations: Iterable[int], engine: str = COMPUTE) -> None:
        """Make the next work on a stream wait for these operations."""
        self._pending[engine].update(operations)

    def finish(self) -> list[Operation]:
        """Add a final wait for pending operations, and return all operations."""
        if self._pending[COMPUTE]:
            self.compute("end", 0.0, launches=0)
        return self.operations

    def _exchange(self, exchange: Operation, after: Iterable[int] = ()) -> int:
        """Add transfers on a lane, which complete together; returns the index of the operation.

        As with torch's process groups, they start after all work that was launched before them.
        """
        needs = self._pending[COMPUTE].union(after)
        if COMPUTE in self._last:
            needs.add(self._last[COMPUTE])
        return self.add(exchange, needs)

    def _key(self, name: str) -> Key:
        """A key prefix that no other operation of this rank uses; the same on all ranks."""
        return name, next(self.keys)

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
        n = self.size
        me = self.rank
        ends = [((me + step) % n, (me - step) % n) for step in range(1, n)]
        return self.send(name, size, ends, (), launches)

    def gathered(self, name: str, numbers: int) -> tuple[int, ...]:
        """Gather ``numbers`` elements of every rank; returns the operations to wait for."""
        return self.collective(name, numbers * ITEM_BYTES) if self.sequence_parallel else ()

    def summed(self, name: str, numbers: int) -> tuple[int, ...]:
        """Sum blocks of ``numbers`` elements; returns the operations to wait for.

        Without sequence parallelism every rank gets all sums.
        """
        waits = self.collective(name, numbers * ITEM_BYTES, sums=True)
        if self.sequence_parallel:
            return waits
        return self.collective(f"{name}, gather", numbers * ITEM_BYTES, launches=0)

    def elsewhere(
        self, name: str, seconds: float, launches: int = 1, group: str = "ep"
    ) -> tuple[int, ...]:
        """Collectives of another group that take ``seconds``; returns what to wait for."""
        return self.send(name, seconds, [(self.rank, self.rank)], (), launches, group)

    def send(
        self,
        name: str,
        size: float,
        ends: Sequence[tuple[int, int]],
        after: Iterable[int],
        launches: int,
        group: str = "tp",
    ) -> tuple[int, ...]:
        """Send ``size`` bytes to the first rank of each pair and receive them from the second.

        To a rank itself: links carry a second of such a message in a second.
        """
        if not ends or size <= 0 or self.variant.kind == "compute" or group in self.free:
            return ()
        key = self._key(name)
        me = self.rank
        sends = []
        receives = []
        for step, (target, source) in enumerate(ends):
            sends.append(Message((*key, step, me), me, target, size))
            receives.append(Message((*key, step, source), source, me, size))
        lane = RING if name == RING else _COLLECTIVE
        host = (launches, 0, EVENTS * launches)
        exchange = Operation(name, lane, 0.0, tuple(sends), tuple(receives), (), *host)
        return (self._exchange(exchange, after),)

    # ------------------------------------------------------------- programs

    def way(self, operation: str) -> Way:
        """How an operation is run; recorded in ``ways``."""
        usual = dict(self.variant.chosen).get(operation, self.variant.way)
        return self.ways.setdefault(operation, usual)

    def run(self, operation: str, rule: Rule, columns: Mapping[str, int]) -> Iterator[None]:
        """Run the program of a rule; yields at its ``AheadEnd``, and before its weight gradient.

        Args:
            columns: of the buffers that the operation provides, by name.
        """
        key = self._key(operation)
        schedule = self.way(operation)
        assert isinstance(schedule, Schedule)
        program = rule.program(RankSpec(schedule, self.rank, self.size))
        widths = {**columns, **{scratch.name: scratch.columns for scratch in program.scratch}}

        def width(span: Span) -> int:
            start, stop = span.columns or (0, widths[span.buffer])
            return stop - start

        def size(span: Span) -> float:
            return span.rows * width(span) * ITEM_BYTES

        def message(end: End) -> Message:
            step, _, source, target, _ = end.transfer
            sent = size(end.span)
            delay = self.machine.buffered(sent)
            return Message((*key, step, source), source, target, sent, delay)

        def seconds(instruction: Compute) -> float:
            a, b = instruction.ins
            if instruction.work == "wgrad":
                return self.machine.gemm(width(a), a.rows, width(b))  # grad^T @ x
            gemm = self.machine.gemm(instruction.outs[0].rows, width(a), width(b))
            if isinstance(rule, ColumnBackward) and width(b) < widths[b.buffer]:
                # These columns of the weight are not contiguous in memory, and copied first.
                gemm += self.machine.memory(2 * ITEM_BYTES * width(a) * width(b))
            return gemm

        exchanged: dict[int, int] = {}
        events: dict[int, set[int]] = {}
        for instruction in program.code:
            engine = SIDE_STREAM if uses_side_stream(instruction) else COMPUTE
            if isinstance(instruction, Post | Collective):
                transfer = instruction.transfer
                name = f"{operation} {transfer.piece}"
                lane = f"lane {transfer.lane}"
                away = [(way, end) for way, end in instruction.ends if not end.transfer.stays]
                sends, receives = (
                    tuple(message(end) for way, end in away if way == side)
                    for side in ("send", "receive")
                )
                host = (0, 1, 0) if isinstance(instruction, Post) else (1, 0, EVENTS)
                exchange = Operation(name, lane, 0.0, sends, receives, (), *host)
                exchanged[transfer.step] = self._exchange(exchange)
            elif isinstance(instruction, Wait):
                self.need((exchanged[step] for step in instruction.steps), engine)
            elif isinstance(instruction, Compute):
                if instruction.work == "wgrad":
                    yield
                self.compute(f"{operation} {instruction.work}", seconds(instruction))
            elif isinstance(instruction, AheadEnd):
                yield
            elif isinstance(instruction, Copy):
                copied = self.machine.memory(2 * size(instruction.out))
                self.compute(f"{operation} copy", copied, engine=engine)
            elif isinstance(instruction, Add):
                added = self.machine.memory(3 * size(instruction.out))
                for _ in range(sum(parts for _, parts in instruction.terms) - 1):
                    self.compute(f"{operation} sum", added, engine=engine)
            elif isinstance(instruction, RecordEvent):
                events[instruction.event] = {self._last[engine]} if engine in self._last else set()
            elif isinstance(instruction, WaitEvent):
                self.need(events[instruction.event], engine)
                self.compute(f"{operation} hold", 0.0, launches=0, engine=engine, events=2)


# ------------------------------------------------------------------------ the ranks of a group

_Build = Callable[[Rank], None]


def simulate(
    links: Links,
    variant: Variant,
    build: _Build,
    *,
    whole: bool | None = None,
    steady: bool = False,
) -> Simulated:
    """Simulate what ``build`` adds to the launches of every rank.

    Args:
        whole: whether to simulate every rank; by default if they do different work.  Otherwise
            a middle rank represents all: it has GEMMs before and after its own block.
        steady: whether this is one of many in a row, between which the host does not wait.  It
            is then ahead of the device, unless launching takes longer than the launched work.
    """
    if variant.tuned:
        variant = _tuned(links, variant, build, steady)
    if whole is None:
        # Ranks in the middle have blocks on both sides of their own.
        whole = variant.kind == "fused" and links.size > 2
    ranks = range(links.size) if whole else [links.size // 2]
    launches = [_built(links, variant, build, rank).finish() for rank in ranks]
    if not whole:
        launches = [fold(launches[0])]
    return Simulated(launches, replace(links, folded=not whole), steady=steady)


def _built(links: Links, variant: Variant, build: _Build, rank: int) -> Rank:
    """One rank with its launches."""
    built = Rank(links, rank, variant)
    build(built)
    return built


def _tuned(links: Links, variant: Variant, build: _Build, steady: bool) -> Variant:
    """Choose the fastest way for each operation in turn, the others fixed as chosen so far.

    One operation may hide the transfers of another, so the total time decides.
    """

    def seconds(variant: Variant) -> float:
        # One rank is enough for the choice.
        return simulate(links, variant, build, whole=False, steady=steady).seconds

    choices = [replace(variant, way=way, tuned=()) for way in variant.tuned]
    fastest = min(choices, key=seconds)
    ways = _built(links, fastest, build, 0).ways
    # A single operation has been tried in every way but by collectives in Megatron's order.
    others = (*(variant.tuned if len(ways) > 1 else ()), None)
    for operation, usual in ways.items():
        tried = (
            replace(fastest, chosen=(*fastest.chosen, (operation, way)))
            for way in others
            if way != usual
        )
        fastest = min(fastest, *tried, key=seconds)
    return fastest


@lru_cache(1 << 14)
def collective_seconds(links: Links, size: float) -> float:
    """Seconds of a plain collective on its own, with ``size`` bytes per block."""
    return simulate(links, REFERENCE, lambda rank: rank.need(rank.collective("", size))).seconds
