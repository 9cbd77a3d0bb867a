"""Sees every operation of every rank, lets it happen by HCCL's rules, and finds deadlocks.

The rules, as far as they could be read in the sources of torch_npu and the documents of HCCL:

- a communicator is opened at first use by all its ranks, whose hosts stand still until then, and
  the link of two ranks in it by the first batch that needs it, all those of a batch at once;
- it has one stream per rank: what is posted there happens in order, an operation starts when the
  one before it is complete;
- a send and its receive take place when both have started: nothing is buffered;
- sends and receives between two ranks match by the order in which they are posted, whatever their
  tags;
- the transfers of a batch take place in any order, and the batch is complete as a whole;
- a collective takes place when the part of every rank has started.

This file has no processes, sockets or clocks in it; :mod:`tests.emulator.referee_thread` has.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tests.emulator.deadlock import Edge, Graph, Needs, Node, hopeless, report
from tests.emulator.messages import (
    EVERYONE,
    Ask,
    Communicator,
    Data,
    Done,
    Ended,
    Failed,
    Fetch,
    FromRank,
    Open,
    Post,
    Read,
    ToRank,
    Wait,
    Why,
)
from tests.emulator.operation import Operation, Round
from tests.emulator.settings import Settings

Opening = tuple[Communicator, ...]


@dataclass
class _Host:
    """The process of one rank."""

    rank: int
    end: str | None = None
    lost: bool = False
    threads: frozenset[int] = frozenset()
    blocked: dict[int, tuple[Operation | Opening, float]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether one of its threads may still do something."""
        return self.end is None and (not self.blocked or bool(self.threads - self.blocked.keys()))


class Referee:
    """Ranks 0..size-1.

    Args:
        send: gives a message to a rank.
    """

    def __init__(self, size: int, settings: Settings, send: Callable[[int, ToRank], None]) -> None:
        self._settings = settings
        self._send = send
        self._hosts = [_Host(rank) for rank in range(size)]
        self._opened: set[Communicator] = set()
        self._run = 0
        self._order = count()
        self._clear()

    def _clear(self) -> None:
        self._operations: dict[tuple[int, int], Operation] = {}
        self._streams: dict[tuple[int, object], deque[Operation]] = defaultdict(deque)
        self._unmatched: dict[object, deque[tuple[Operation, int]]] = defaultdict(deque)
        self._rounds: dict[Communicator, list[Round]] = defaultdict(list)
        self._joined: dict[tuple[Communicator, int], int] = defaultdict(int)
        self._opening: dict[Communicator, dict[int, int]] = defaultdict(dict)
        self._moved: dict[object, int] = defaultdict(int)
        self._moves: list[tuple[float, int, Operation, int]] = []
        self._changed = True

    def begin(self, settings: Settings) -> None:
        """All ranks start their next function: forget what the last one left behind."""
        self._settings = settings
        self._run += 1
        self._clear()
        for host in self._hosts:
            host.end = None if not host.lost else host.end
            host.threads, host.blocked = frozenset(), {}

    @property
    def at_rest(self) -> bool:
        """All ranks ended their function, and nothing is on its way."""
        return not self._moves and all(host.end is not None for host in self._hosts)

    def left_over(self) -> list[str]:
        """The operations that never took place, and of which no rank was told by a deadlock."""
        return [
            f"rank {operation.rank}: {operation}"
            for operation in self._operations.values()
            if not operation.complete
            and (operation.failed is None or operation.failed[0] == "mismatch")
        ]

    # ------------------------------------------------------------------ what ranks say

    def handle(self, rank: int, message: FromRank, now: float) -> None:
        """Take in what a rank says, and let happen what can happen now."""
        self._changed = True
        host = self._hosts[rank]
        if isinstance(message, Post):
            host.threads |= {message.thread}
            self._post(rank, message, now)
        elif isinstance(message, Open):
            self._open(host, message, now)
        elif isinstance(message, Wait):
            self._wait(host, message, now)
        elif isinstance(message, Ask):
            asked = self._operations.get((rank, message.number))
            self._send(rank, Done(message.thread, {}, asked is None or asked.complete))
        elif isinstance(message, Read):
            operation = self._operations.get((rank, message.number))
            if operation is not None and operation.data is None:
                operation.data = message.data
                self._forget(operation)
                self._deliver_all()
        elif isinstance(message, Ended) and message.run == self._run:
            how = f"with {message.error}" if message.error else "and does nothing more"
            host.end = f"rank {rank} has ended its function {how}"

    def lost(self, rank: int) -> None:
        """The process of a rank is gone."""
        host = self._hosts[rank]
        host.lost, host.end, host.blocked = True, f"the process of rank {rank} is gone", {}
        self._changed = True
        self._deliver_all()

    def _post(self, rank: int, message: Post, now: float) -> None:
        operation = Operation(rank, message)
        self._operations[rank, operation.number] = operation
        self._stream(operation).append(operation)
        ready = [operation]
        if message.agreed is not None:
            self._join(operation, message.agreed)
            assert operation.round is not None
            ready = list(operation.round.parts.values())
        for place in range(len(operation.ends)):
            self._match(operation, place)
            partner = operation.partners[place]
            ready += [partner[0]] if partner else []
        self._advance(ready, now)

    def _stream(self, operation: Operation) -> deque[Operation]:
        communicator = operation.communicator
        name: object = communicator
        if self._settings.streams is not None:
            drawn = random.Random(f"{self._settings.seed}/{operation.rank}/{communicator}")
            name = drawn.randrange(self._settings.streams)
        return self._streams[operation.rank, name]

    def _join(self, operation: Operation, agreed: str) -> None:
        communicator = operation.communicator
        rounds, place = self._rounds[communicator], self._joined[communicator, operation.rank]
        self._joined[communicator, operation.rank] += 1
        if place == len(rounds):
            rounds.append(Round(agreed))
        operation.round = rounds[place]
        others = list(operation.round.parts.values())
        operation.round.parts[operation.rank] = operation
        if operation.round.agreed != agreed:
            self._fail(
                [operation, *others],
                "mismatch",
                f"the ranks of {communicator} do not call the same as their collective {place}: "
                f"rank {operation.rank} calls {agreed}, rank {others[0].rank} calls "
                f"{operation.round.agreed}",
            )
        elif others and others[0].failed:
            self._fail([operation], *others[0].failed)

    def _match(self, operation: Operation, place: int) -> None:
        """The other end is the oldest one of its direction without a partner; tags do not count."""
        end, rank, communicator = operation.ends[place], operation.rank, operation.communicator
        verb = "receive" if end.verb == "send" else "send"
        waiting = self._unmatched[communicator, end.peer, rank, verb]
        if not waiting:
            self._unmatched[communicator, rank, end.peer, end.verb].append((operation, place))
            return
        other, there = waiting.popleft()
        operation.partners[place], other.partners[there] = (other, there), (operation, place)
        theirs = other.ends[there]
        if (end.elements, end.dtype) != (theirs.elements, theirs.dtype):
            self._fail(
                [operation, other],
                "mismatch",
                f"the two ends of a transfer on {communicator} differ: rank {rank} has to {end}, "
                f"rank {end.peer} to {theirs}; messages match by order",
            )
        elif other.failed:
            self._fail([operation], *other.failed)

    def _open(self, host: _Host, message: Open, now: float) -> None:
        host.threads = message.threads
        host.blocked[message.thread] = (message.communicators, now + message.seconds)
        come = [(host.rank, message.thread)]
        for communicator in message.communicators:
            if communicator in self._opened:
                continue
            self._opening[communicator][host.rank] = message.thread
            if len(self._opening[communicator]) == len(communicator.ranks):
                self._opened.add(communicator)
                come += self._opening.pop(communicator).items()
        for rank, thread in dict.fromkeys(come):
            what, _ = self._hosts[rank].blocked[thread]
            if isinstance(what, tuple) and self._opened.issuperset(what):
                self._release(rank, Done(thread, {}))

    def _wait(self, host: _Host, message: Wait, now: float) -> None:
        operation = self._operations.get((host.rank, message.number))
        if operation is None:
            why = "the operation was posted by another function than the one that waits for it"
            self._send(host.rank, Failed(message.thread, "mismatch", why))
            return
        host.threads = message.threads
        if message.data is not None and operation.data is None:
            operation.data = message.data
        operation.waiter = message.thread
        host.blocked[message.thread] = (operation, now + message.seconds)
        if operation.failed:
            self._fail([operation], *operation.failed)
        self._deliver_all()

    # ------------------------------------------------------------------ what happens

    def _advance(self, ready: list[Operation], now: float) -> None:
        """Start what is at the head of its stream, and move what has both ends started."""
        while ready:
            operation = ready.pop()
            stream = self._stream(operation)
            if operation.failed or operation.complete or stream[0] is not operation:
                continue
            operation.started = True
            if operation.round is not None:
                parts = operation.round.parts
                whole = len(parts) == len(operation.communicator.ranks)
                if whole and all(part.started and not part.failed for part in parts.values()):
                    for part in parts.values():
                        if not part.moving:
                            self._move(part, 0, now, ready)
                continue
            for place, partner in enumerate(operation.partners):
                if (
                    partner is not None
                    and partner[0].started
                    and place not in operation.moving
                    and not operation.arrived[place]
                ):
                    self._move(operation, place, now, ready)
            if not operation.ends:
                self._complete(operation, ready)

    def _move(self, operation: Operation, place: int, now: float, ready: list[Operation]) -> None:
        operation.moving.add(place)
        if operation.round is None:
            other = operation.partners[place]
            assert other is not None
            other[0].moving.add(other[1])
        if not self._settings.max_delay:
            self._arrive(operation, place, ready)
            return
        peer = operation.ends[place].peer if operation.ends else None
        key = (operation.communicator, operation.rank, peer)
        self._moved[key] += 1
        drawn = random.Random(f"{self._settings.seed}/{key}/{self._moved[key]}")
        due = now + drawn.uniform(0, self._settings.max_delay)
        heapq.heappush(self._moves, (due, next(self._order), operation, place))

    def _arrive(self, operation: Operation, place: int, ready: list[Operation]) -> None:
        if operation.round is not None:
            self._complete(operation, ready)
            return
        partner = operation.partners[place]
        assert partner is not None
        for one, there in ((operation, place), partner):
            one.arrived[there] = True
            if all(one.arrived):
                self._complete(one, ready)

    def _complete(self, operation: Operation, ready: list[Operation]) -> None:
        operation.complete = True
        stream = self._stream(operation)
        assert stream.popleft() is operation
        if stream:
            ready.append(stream[0])
        if self._settings.read_sends == "match":
            self._ask(operation)
        if operation.waiter is not None:
            self._deliver(operation)

    def _ask(self, operation: Operation) -> None:
        if operation.data is None and not operation.asked:
            operation.asked = True
            self._send(operation.rank, Fetch(operation.number))

    def _deliver_all(self) -> None:
        for host in self._hosts:
            for what, _ in list(host.blocked.values()):
                if isinstance(what, Operation) and what.complete:
                    self._deliver(what)

    def _deliver(self, operation: Operation) -> None:
        """Hand out what arrived, if its senders' data were read; else have them read."""
        missing = [source for source in operation.sources() if source.data is None]
        for source in missing:
            if self._hosts[source.rank].lost:
                why = f"the process of rank {source.rank} is gone; {operation} of rank "
                self._fail([operation], "lost", f"{why}{operation.rank} needs its data")
                return
            self._ask(source)
        if missing:
            return
        assert operation.waiter is not None
        waiter, operation.waiter = operation.waiter, None
        operation.delivered = True
        self._forget(operation)
        self._release(operation.rank, Done(waiter, _received(operation)))

    def _forget(self, operation: Operation) -> None:
        """Strike it off when its rank is done with it and has given what it sends."""
        if operation.delivered and operation.data is not None:
            del self._operations[operation.rank, operation.number]

    def _release(self, rank: int, message: Done | Failed) -> None:
        self._hosts[rank].blocked.pop(message.thread, None)
        self._send(rank, message)

    def _fail(self, operations: list[Operation], kind: Why, why: str) -> None:
        """They never complete; who waits for one of them is told."""
        for operation in operations:
            operation.failed = operation.failed or (kind, why)
            if operation.waiter is not None:
                failed_kind, reason = operation.failed
                waiter, operation.waiter = operation.waiter, None
                self._release(operation.rank, Failed(waiter, failed_kind, reason))

    # ------------------------------------------------------------------ time

    @property
    def unsettled(self) -> bool:
        """Whether something happened since :meth:`settle`."""
        return self._changed

    def due(self) -> float | None:
        """When :meth:`tick` has something to do."""
        times = [deadline for host in self._hosts for _, deadline in host.blocked.values()]
        times += [self._moves[0][0]] if self._moves else []
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Let arrive what has been long enough on its way; end the waits that took too long."""
        ready: list[Operation] = []
        while self._moves and self._moves[0][0] <= now:
            _, _, operation, place = heapq.heappop(self._moves)
            if not operation.failed:
                self._arrive(operation, place, ready)
                self._changed = True
        self._advance(ready, now)
        for host in self._hosts:
            for thread, (what, deadline) in list(host.blocked.items()):
                if deadline <= now:
                    chain = report(self._graph(), ("host", host.rank))
                    why = f"no progress within the time limit: {chain}"
                    self._give_up(host.rank, thread, what, "timeout", why)

    # ------------------------------------------------------------------ deadlocks

    def settle(self) -> None:
        """Tell the ranks that wait in vain.  For a moment in which nothing is under way to us."""
        if not self._changed:
            return
        self._changed = False
        if not any(host.blocked for host in self._hosts):
            return
        graph = self._graph()
        vain = hopeless(graph)
        told = [
            (host, "deadlock: " + report(graph, ("host", host.rank), vain))
            for host in self._hosts
            if ("host", host.rank) in vain and host.blocked
        ]
        for node in vain:
            if isinstance(node, Operation) and node.failed is None:
                text = report(graph, node, vain)
                node.failed = ("deadlock", f"deadlock: {text}")
        for host, text in told:
            for thread, (what, _) in list(host.blocked.items()):
                self._give_up(host.rank, thread, what, "deadlock", text)

    def _give_up(
        self, rank: int, thread: int, what: Operation | Opening, kind: Why, why: str
    ) -> None:
        if isinstance(what, Operation):
            what.failed, what.waiter = what.failed or (kind, why), None
        else:
            for communicator in what:
                self._opening[communicator].pop(rank, None)
        self._release(rank, Failed(thread, kind, why))

    def _graph(self) -> Graph:
        graph: dict[Node, Needs] = {}
        for host in self._hosts:
            graph["host", host.rank] = self._needs_of_host(host)
        for operation in self._operations.values():
            graph[operation] = self._needs(operation)
        return graph

    def _needs_of_host(self, host: _Host) -> Needs:
        if host.end is not None:
            return Needs(host.rank, "never", note=host.end)
        if host.running:
            return Needs(host.rank, "all", note=f"rank {host.rank} is running its own code")
        edges = []
        for what, _ in host.blocked.values():
            if isinstance(what, Operation):
                edges.append(Edge(what, f"rank {host.rank} waits for its {what}"))
                continue
            absent = [
                (one, rank)
                for one in what
                if one not in self._opened
                for rank in one.ranks
                if rank not in self._opening[one]
            ]
            for one, rank in absent[:1]:
                why = f"rank {host.rank} opens {one}, which rank {rank} has not come to open"
                edges.append(Edge(("host", rank), why))
        return Needs(host.rank, "any", tuple(edges))

    def _needs(self, operation: Operation) -> Needs:
        rank = operation.rank
        if operation.failed:
            note = f"{operation} of rank {rank} was given up before"
            return Needs(rank, "never", note=note)
        if operation.complete:
            return Needs(rank, "all", note=f"{operation} of rank {rank} is complete")
        before = self._before(operation)
        if before is not None:
            why = f"the {operation} of rank {rank} is queued behind its {before}"
            return Needs(rank, "all", (Edge(before, why),))
        edges = list(self._needs_of_collective(operation))
        for place, end in enumerate(operation.ends):
            partner = operation.partners[place]
            if operation.arrived[place] or place in operation.moving:
                continue
            needed = f"rank {rank} has to {end} on {operation.communicator}"
            verb = "receive" if end.verb == "send" else "send"
            if partner is None:
                why = f"{needed}, and rank {end.peer} has not posted the {verb}"
                edges.append(Edge(("host", end.peer), why))
            else:
                ahead = self._before(partner[0])
                what = f", but rank {end.peer} has queued that behind its {ahead}" if ahead else ""
                edges.append(Edge(ahead or partner[0], needed + what))
        return Needs(rank, "all", tuple(edges), f"{operation} of rank {rank} is under way")

    def _needs_of_collective(self, operation: Operation) -> list[Edge]:
        if operation.round is None or operation.moving:
            return []
        edges = []
        needed = f"rank {operation.rank} is in {operation}"
        for rank in operation.communicator.ranks:
            part = operation.round.parts.get(rank)
            if part is None:
                edges.append(Edge(("host", rank), f"{needed}, and rank {rank} has not posted it"))
            elif (ahead := self._before(part)) is not None:
                why = f"{needed}, which rank {rank} has queued behind its {ahead}"
                edges.append(Edge(ahead, why))
        return edges

    def _before(self, operation: Operation) -> Operation | None:
        """What is at the head of its stream, if that is another one."""
        if operation.complete or operation.started:
            return None
        head = self._stream(operation)[0]
        return head if head is not operation else None


def _received(operation: Operation) -> Data:
    if operation.round is not None:
        found = {}
        for source in operation.sources():
            assert source.data is not None
            data = source.data.get(operation.rank, source.data.get(EVERYONE))
            if data is not None:
                found[source.rank] = data
        return found
    received = {}
    for place, (end, partner) in enumerate(zip(operation.ends, operation.partners, strict=True)):
        if end.verb == "receive":
            assert partner is not None
            assert partner[0].data is not None
            received[place] = partner[0].data[partner[1]]
    return received
