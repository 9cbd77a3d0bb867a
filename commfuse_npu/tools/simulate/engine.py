"""Discrete-event simulation of what the hosts of a group's ranks launch, on the links of a machine.

There are two kinds of operations: work on a compute engine, and exchanges on a lane.  Those on an
engine or a lane run in the order of the list, as on a stream.  As with torch's process groups, an
exchange starts after the work that was launched before it, and work starts after the exchanges that
it waits for.

The ranks of a group are on the NPUs ``0, stride, 2 * stride, ...``; in Megatron's rank order
tensor-parallel neighbors are adjacent and data-parallel neighbors ``tp * cp`` apart.

A message of a rank to itself stands for a transfer in another group, on links that nothing else
uses: its size is in seconds.

With ``folded`` one rank represents all: in a symmetric group every rank sends at distance k when
this one does, so the traffic into this rank equals the traffic out of it.

* An operation starts when its host has launched it, the previous operation on its engine or lane
  is complete, and all that it depends on is complete.
* The latency of a transfer starts when both of its ends have started (rendezvous).  Its bytes then
  move at the minimum over its links of capacity / number of transfers on the link.  These equal
  shares are what a fair switch gives while all transfers are limited by the same kind of link;
  otherwise they are slightly pessimistic, and never exceed a link's capacity.
* A transfer takes ``beside_work`` times as long while the first stream of one of its ends computes.
* Work runs at full speed, or at ``1 - transfer_slowdown`` while something else accesses the memory
  of its NPU: a transfer, or work of the other stream.

Rates change only at events, so times are exact up to rounding.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from commfuse_npu.tools.hardware.machine import Level, Machine

COMPUTE = "compute"
SIDE_STREAM = "side stream"
"""The engines: the first stream of a device, and the side stream."""

Key = tuple[object, ...]


class Message(NamedTuple):
    """One transfer; both of its ends refer to the same message.

    ``size`` is in bytes; ``delay`` is in seconds, added to the time of latency and links.
    """

    key: Key
    source: int
    target: int
    size: float
    delay: float = 0.0


class Operation(NamedTuple):
    """One launch.

    Attributes:
        engine: ``compute``, ``side stream`` or a lane's name.
        seconds: work at full speed; 0 for exchanges.
        sends, receives: messages; the operation is complete when all of them are.
        after: indices of operations of the same rank that must complete first.
        launches: number of host launches; 0 inside a kernel or a collective.
        posts: number of point-to-point batches that the host posts.
        events: number of events that are recorded or that a stream waits for.
    """

    name: str
    engine: str
    seconds: float = 0.0
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()
    launches: float = 1
    posts: int = 0
    events: int = 0

    def host(self, machine: Machine) -> float:
        """Seconds of host time."""
        return machine.host(self.launches, self.posts, self.events)


def fold(operations: Sequence[Operation]) -> list[Operation]:
    """The operations of one rank, changed to represent all ranks of a symmetric group.

    In each step a rank receives the counterpart of what it sends, so the receive gets the message
    of the send.  The last element of a key is the sending rank.
    """
    sent = {message.key[:-1]: message for operation in operations for message in operation.sends}
    return [
        operation._replace(receives=tuple(sent[way.key[:-1]] for way in operation.receives))
        for operation in operations
    ]


# ------------------------------------------------------------------------ links

LinkId = tuple[str | int, ...]
"""Kind of link, and its one or two ends."""


@dataclass(frozen=True)
class Links:
    """The links of one group.

    Attributes:
        size, stride: number of ranks, and distance in NPUs from one rank to the next.
        folded: whether rank 0 represents all.

    Raises:
        ValueError: the group spans nodes, and the machine has no links between nodes, or the nodes
            hold different numbers of its ranks.
    """

    machine: Machine
    size: int
    stride: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        machine = self.machine
        size = self.size
        stride = self.stride
        node = machine.npus_per_node
        if (size - 1) * stride >= node:
            if not machine.between:
                raise ValueError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fit a node of {node} "
                    f"NPUs, and this machine has no links between nodes; choose sizes whose "
                    f"product is at most {node}"
                )
            if stride < node and (node % stride or size % (node // stride)):
                raise ValueError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fill whole nodes of "
                    f"{node} NPUs; choose sizes whose product {node} divides, or that divides it"
                )

    def level(self, source: int, target: int) -> Level:
        """The kind of links of a transfer."""
        machine = self.machine
        node = self.machine.npus_per_node
        if source == target:
            return replace(machine.inside, rate=1.0, latency=0.0)
        if source * self.stride // node == target * self.stride // node:
            return machine.inside
        assert machine.between
        return machine.between

    def path(self, source: int, target: int) -> tuple[LinkId, ...]:
        """The links that a transfer occupies, from the first to the last."""
        topology = self.level(source, target).topology
        if topology == "full_mesh" or source == target:
            return (("pair", source, target),)
        return (f"{topology}, out", source), (f"{topology}, in", source if self.folded else target)


# ------------------------------------------------------------------------ the simulation

STREAMS = COMPUTE, SIDE_STREAM


@dataclass(eq=False, slots=True)
class _Activity:
    """What takes time: how much of it remains ``since`` a time, its rate, and its end."""

    remaining: float
    rate: float = 0.0
    since: float = 0.0
    start: float = 0.0
    end: float = 0.0

    def begin(self, now: float) -> None:
        self.start = now
        self.since = now
        self.end = math.inf

    def change(self, rate: float, now: float) -> None:
        """Continue at this rate."""
        if rate != self.rate:
            self.remaining = max(0.0, self.remaining - self.rate * (now - self.since))
            self.rate = rate
            self.since = now
            self.end = now + self.remaining / rate


class TimeSpan(_Activity):
    """A simulated operation; times in seconds from the start.

    Besides, the number of its open dependencies, and of its unfinished transfers.
    """

    __slots__ = ("followers", "index", "open_transfers", "operation", "rank", "waits")

    def __init__(self, rank: int, index: int, operation: Operation) -> None:
        super().__init__(operation.seconds)
        self.rank = rank
        self.index = index
        self.operation = operation
        self.open_transfers = len(operation.sends) + len(operation.receives)
        self.followers: list[TimeSpan] = []
        self.waits = 0


class Moved(_Activity):
    """A simulated transfer; its latency is over at ``start``.

    ``touched``: the ranks whose memory it reads or writes.
    """

    __slots__ = ("level", "message", "path", "touched")

    def __init__(self, message: Message, links: Links) -> None:
        super().__init__(message.size)
        self.message = message
        ends = (message.source, message.target)
        self.level = links.level(*ends)
        self.path = links.path(*ends)
        self.touched = {0} if links.folded else set(ends)


class Simulated:
    """The launches of ranks ``0, 1, ...``, run to completion.

    Args:
        launches: operations of each rank; folded operations of one rank if the links are folded.
        steady: whether this is one of many repetitions in a row, whose hosts have launched
            everything at time 0; otherwise they start then.

    Attributes:
        device: seconds at which everything is complete.
        spans, moved: operations and transfers, in the order of their ends.
    """

    def __init__(
        self, launches: Sequence[Sequence[Operation]], links: Links, *, steady: bool = False
    ) -> None:
        self.launches = launches
        self.links = links
        self.steady = steady
        self._now = 0.0
        self.spans: list[TimeSpan] = []
        self.moved: list[Moved] = []
        self._later: list[tuple[float, int, Callable[[Any], None], Any]] = []
        """What happens at a known time, as a heap; the numbers keep the order of equal times."""
        self._pushed = 0
        self._ends: dict[Key, list[TimeSpan]] = {}
        """The started operations of which a message is part."""
        self._work: dict[tuple[int, str | None], TimeSpan] = {}
        self._flows: dict[Moved, None] = {}
        self._on_link: Counter[LinkId] = Counter()
        self._touching: Counter[int] = Counter()
        tasks = [
            task
            for rank, operations in enumerate(launches)
            for task in self._tasks_of(rank, operations)
        ]
        self._run(tasks)

    def host(self, machine: Machine) -> float:
        """Seconds of the busiest rank's host."""
        return max(sum(operation.host(machine) for operation in rank) for rank in self.launches)

    @property
    def seconds(self) -> float:
        """Of one of many repetitions that of the device or the host, whichever is longer."""
        return max(self.device, self.host(self.links.machine)) if self.steady else self.device

    @property
    def shown_rank(self) -> int:
        """The rank to show: the one in the middle, or the one that represents all."""
        return 0 if self.links.folded else len(self.launches) // 2

    def _tasks_of(self, rank: int, operations: Sequence[Operation]) -> list[TimeSpan]:
        tasks = [TimeSpan(rank, *numbered) for numbered in enumerate(operations)]
        last: dict[str, int] = {}
        at = 0.0
        for task in tasks:
            operation = task.operation
            needs = set(operation.after)
            if operation.engine in last:
                needs.add(last[operation.engine])
            last[operation.engine] = task.index
            for need in needs:
                tasks[need].followers.append(task)
            task.waits = len(needs)
            at += 0.0 if self.steady else operation.host(self.links.machine)
            if at > 0:
                task.waits += 1
                self._push(at, self._count_down, task)
        return tasks

    def _run(self, tasks: Sequence[TimeSpan]) -> None:
        for task in [task for task in tasks if not task.waits]:
            self._start(task)
        while self._work or self._flows or self._later:
            self._set_rates()
            work = list(self._work.values())
            flows = list(self._flows)
            at_known_times = (time for time, *_ in self._later[:1])
            self._now = min([*(running.end for running in (*work, *flows)), *at_known_times])
            for task in work:
                if task.end <= self._now:
                    del self._work[task.rank, task.operation.engine]
                    self._done(task)
            for flow in flows:
                if flow.end <= self._now:
                    self._arrived(flow)
            while self._later and self._later[0][0] <= self._now:
                _, _, action, subject = heapq.heappop(self._later)
                action(subject)
        left = len(tasks) - len(self.spans)
        assert not left, f"{left} operations wait for each other, or for an end that never starts"
        self.device = self._now

    def _push(self, time: float, action: Callable[[Any], None], subject: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._later, (time, self._pushed, action, subject))

    def _count_down(self, task: TimeSpan) -> None:
        """Count down the dependencies of a task, and start it after the last one."""
        task.waits -= 1
        if task.waits == 0:
            self._start(task)

    def _start(self, task: TimeSpan) -> None:
        operation = task.operation
        task.begin(self._now)
        if operation.engine in STREAMS:
            self._work[task.rank, operation.engine] = task
        for message in (*operation.sends, *operation.receives):
            ends = self._ends.setdefault(message.key, [])
            ends.append(task)
            if len(ends) == 2:
                latency = self.links.level(message.source, message.target).latency
                self._push(self._now + latency + message.delay, self._begin, message)

    def _begin(self, message: Message) -> None:
        flow = Moved(message, self.links)
        flow.begin(self._now)
        self._flows[flow] = None
        self._on_link.update(flow.path)
        self._touching.update(flow.touched)

    def _set_rates(self) -> None:
        for (rank, _), work in self._work.items():
            disturbed = self._touching[rank] or all((rank, e) in self._work for e in STREAMS)
            work.change(1.0 - self.links.machine.transfer_slowdown * bool(disturbed), self._now)
        for flow in self._flows:
            rate = flow.level.rate / max(self._on_link[link] for link in flow.path)
            if any((rank, COMPUTE) in self._work for rank in flow.touched):
                rate /= flow.level.beside_work
            flow.change(rate, self._now)

    def _arrived(self, flow: Moved) -> None:
        del self._flows[flow]
        self._on_link.subtract(flow.path)
        self._touching.subtract(flow.touched)
        self.moved.append(flow)
        for task in self._ends[flow.message.key]:
            task.open_transfers -= 1
            if task.open_transfers == 0:
                self._done(task)

    def _done(self, task: TimeSpan) -> None:
        task.end = self._now
        self.spans.append(task)
        for follower in task.followers:
            self._count_down(follower)
