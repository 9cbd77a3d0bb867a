"""Discrete events: plays the launches of all ranks of a group on a machine's links.

* An operation starts when its host has launched it, the one before it on its engine or lane is
  done, and what it waits for is done.
* A transfer begins its latency when both of its ends have started (rendezvous), then moves its
  bytes at ``min`` over its links of capacity / transfers on that link.  Equal shares are what a
  fair switch gives while all transfers are limited by the same kind of link; where they are not,
  it is a little pessimistic, and never more than a link can carry.
* A transfer takes ``beside_work`` times as long while the first stream of an end of it is at work.
* Work runs at full speed, or at ``1 - transfer_slowdown`` while anything else reads or writes the
  memory of its NPU: a transfer, or the work of the other stream.

Rates change only at events, so times are exact up to rounding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Launches, Message, Operation
from commfuse_npu.tools.simulate.links import LinkId, Links

__all__ = ["Cause", "Moved", "SimulationError", "Span", "Timeline", "simulate"]


_STREAMS = COMPUTE, ASIDE


class SimulationError(RuntimeError):
    """The launches cannot be played to their end: ranks wait for each other, or for nobody."""


class Cause(NamedTuple):
    """What an operation or a transfer waited for last; times are contiguous along causes."""

    kind: Literal["operation", "host", "start"]
    rank: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """An operation that was played, in seconds from the start."""

    rank: int
    index: int
    operation: Operation
    start: float
    end: float
    cause: Cause
    """Why it did not start earlier."""
    ended_by: int | None
    """Index into ``moved`` of the transfer that ended it, for exchanges."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that was played.  ``ready``: both ends started; ``start``: after the latency."""

    message: Message
    links: tuple[LinkId, ...]
    ready: float
    start: float
    end: float
    cause: Cause
    """The end that started last."""


@dataclass(frozen=True)
class Timeline:
    """What happened.  ``seconds``: until everything was done."""

    seconds: float
    spans: tuple[Span, ...]
    moved: tuple[Moved, ...]


class _Flow:
    __slots__ = (
        "cause",
        "links",
        "message",
        "rate",
        "ready",
        "remaining",
        "since",
        "start",
        "turn",
    )

    def __init__(self, message: Message, links: tuple[LinkId, ...], ready: float, cause: Cause):
        self.message, self.links, self.ready, self.cause = message, links, ready, cause
        self.remaining = message.size
        self.rate = self.start = self.since = 0.0
        self.turn = 0


class _Work:
    """What a compute engine is doing."""

    __slots__ = ("index", "rate", "remaining", "since", "turn")

    def __init__(self, index: int, seconds: float, rate: float, now: float) -> None:
        self.index, self.remaining, self.rate, self.since = index, seconds, rate, now
        self.turn = 0


def simulate(
    launches: Sequence[Launches],
    links: Links,
    *,
    launched: bool = False,
) -> Timeline:
    """Play the launches of ranks ``0, 1, ...`` to their end.

    Args:
        launches: of each rank; folded ones of a single rank if the links are folded.
        launched: whether the hosts are through with it already, else they begin together with it.

    Raises:
        SimulationError: operations are left that wait for something that never happens.
    """
    return _Simulation(launches, links, launched).run()


class _Simulation:
    def __init__(
        self,
        launches: Sequence[Launches],
        links: Links,
        launched: bool,
    ) -> None:
        self.links, self.launched = links, launched
        self.slowdown = links.machine.transfer_slowdown
        self.operations = [rank.operations for rank in launches]
        self.now = 0.0
        self._events: list[tuple[float, int, str, object, int]] = []
        self._sequence = 0
        self._ends: dict[object, int] = {}
        self._owners: dict[object, list[tuple[int, int]]] = {}
        self._on_link: dict[LinkId, dict[_Flow, None]] = {}
        self._capacity: dict[LinkId, float] = {}
        self._transfers: list[dict[_Flow, None]] = [{} for _ in launches]
        self._busy = [False] * len(launches)
        self._running: dict[tuple[int, str], _Work] = {}
        self._spans: list[Span] = []
        self._moved: list[Moved] = []
        self._shared_anew: dict[LinkId, None] = {}
        self._hurried: dict[int, None] = {}
        self._left = self._turns = 0
        self._prepare()

    def _prepare(self) -> None:
        self._waiting: list[list[int]] = []
        self._open: list[list[int]] = []
        self._followers: list[list[list[int]]] = []
        self._started: list[list[float]] = []
        self._cause: list[list[Cause]] = []
        ready: list[tuple[int, int]] = []
        for rank, operations in enumerate(self.operations):
            waiting = [0] * len(operations)
            followers: list[list[int]] = [[] for _ in operations]
            last: dict[str, int] = {}
            launched = 0.0
            for index, operation in enumerate(operations):
                needs = set(operation.after)
                if operation.engine is not None:
                    if operation.engine in last:
                        needs.add(last[operation.engine])
                    last[operation.engine] = index
                for need in needs:
                    followers[need].append(index)
                waiting[index] = len(needs)
                launched += 0.0 if self.launched else operation.host(self.links.machine)
                if launched > 0:
                    waiting[index] += 1
                    self._push(launched, "launched", rank, index)
                for message in (*operation.sends, *operation.receives):
                    self._owners.setdefault(message.key, []).append((rank, index))
                if waiting[index] == 0:
                    ready.append((rank, index))
            self._left += len(operations)
            self._waiting.append(waiting)
            self._followers.append(followers)
            self._open.append([len(op.sends) + len(op.receives) for op in operations])
            self._started.append([math.nan] * len(operations))
            self._cause.append([Cause("start")] * len(operations))
        self._ready = ready

    def run(self) -> Timeline:
        for rank, index in self._ready:
            self._start(rank, index)
        while self._events or self._shared_anew:
            # Once for all that begins and ends in an instant: a rank of a large group has a
            # transfer per peer, and each would share the link among all of them again.
            if not self._events or self._events[0][0] > self.now:
                self._set_rates()
            if not self._events:
                break
            time, _, kind, what, number = heapq.heappop(self._events)
            if kind == "launched":
                assert isinstance(what, int)
                self.now = time
                self._met(what, number, Cause("host", what, number))
            elif kind == "work":
                assert isinstance(what, tuple)
                work = self._running.get(what)
                if work is None or work.turn != number:
                    continue  # its rate has changed since
                self.now = time
                del self._running[what]
                self._change_speed(what[0])
                self._done(what[0], work.index, None)
                self._look_at(what[0])
            elif kind == "begin":
                assert isinstance(what, _Flow)
                self.now = time
                self._begin(what)
            else:
                assert isinstance(what, _Flow)
                if what.turn != number:
                    continue
                self.now = time
                self._end(what)
        if self._left:
            raise SimulationError(self._stuck())
        return Timeline(self.now, tuple(self._spans), tuple(self._moved))

    def _stuck(self) -> str:
        """Names the exchange that hangs first; the others wait behind it."""
        hanging = [
            (start, rank, index)
            for rank, started in enumerate(self._started)
            for index, start in enumerate(started)
            if not math.isnan(start) and self._open[rank][index] > 0
        ]
        if not hanging:
            return f"{self._left} operations wait for each other"
        _, rank, index = min(hanging)
        operation = self.operations[rank][index]
        return (
            f"rank {rank} waits for ever in {operation.name!r} on {operation.engine}: "
            f"{self._open[rank][index]} transfers never began, because their other ends never "
            f"started; {self._left} operations are left"
        )

    def _push(self, time: float, kind: str, what: object, number: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, kind, what, number))

    def _met(self, rank: int, index: int, cause: Cause) -> None:
        self._waiting[rank][index] -= 1
        self._cause[rank][index] = cause
        if self._waiting[rank][index] == 0:
            self._start(rank, index)

    def _start(self, rank: int, index: int) -> None:
        operation = self.operations[rank][index]
        self._started[rank][index] = self.now
        if operation.engine in _STREAMS:
            work = _Work(index, operation.seconds, 0.0, self.now)
            self._running[rank, operation.engine] = work
            self._change_speed(rank)
            self._look_at(rank)
            return
        if not self._open[rank][index]:
            self._done(rank, index, None)
            return
        for message in (*operation.sends, *operation.receives):
            ends = self._ends.get(message.key, 0) + 1
            self._ends[message.key] = ends
            if ends == 2:
                path = self.links.path(message.source, message.target)
                flow = _Flow(message, path, self.now, Cause("operation", rank, index))
                latency = self.links.latency(message.source, message.target)
                self._push(self.now + latency + message.delay, "begin", flow, 0)

    def _done(self, rank: int, index: int, ended_by: int | None) -> None:
        self._left -= 1
        self._spans.append(
            Span(
                rank,
                index,
                self.operations[rank][index],
                self._started[rank][index],
                self.now,
                self._cause[rank][index],
                ended_by,
            )
        )
        cause = Cause("operation", rank, index)
        for follower in self._followers[rank][index]:
            self._met(rank, follower, cause)

    # ------------------------------------------------------------------- transfers

    def _touched(self, message: Message) -> tuple[int, ...]:
        """The ranks whose memory a transfer reads or writes."""
        if self.links.folded:
            return (0,)
        return message.source, message.target

    def _begin(self, flow: _Flow) -> None:
        flow.start = flow.since = self.now
        for link in flow.links:
            self._on_link.setdefault(link, {})[flow] = None
            if link not in self._capacity:
                self._capacity[link] = self.links.capacity(link)
        for rank in self._touched(flow.message):
            self._transfers[rank][flow] = None
            if len(self._transfers[rank]) == 1:
                self._change_speed(rank)
        self._shared_anew.update(dict.fromkeys(flow.links))

    def _end(self, flow: _Flow) -> None:
        for link in flow.links:
            del self._on_link[link][flow]
        for rank in self._touched(flow.message):
            del self._transfers[rank][flow]
            if not self._transfers[rank]:
                self._change_speed(rank)
        self._shared_anew.update(dict.fromkeys(flow.links))
        self._moved.append(
            Moved(flow.message, flow.links, flow.ready, flow.start, self.now, flow.cause)
        )
        number = len(self._moved) - 1
        for rank, index in self._owners[flow.message.key]:
            self._open[rank][index] -= 1
            if self._open[rank][index] == 0:
                self._done(rank, index, number)

    def _set_rates(self) -> None:
        """Give the transfers whose links or ends have changed the rate that they have from now."""
        affected = {flow: None for link in self._shared_anew for flow in self._on_link[link]}
        for rank in self._hurried:
            affected |= self._transfers[rank]
        self._shared_anew.clear()
        self._hurried.clear()
        for flow in affected:
            rate = min(self._capacity[link] / len(self._on_link[link]) for link in flow.links)
            if any(self._busy[rank] for rank in self._touched(flow.message)):
                rate /= self.links.beside_work(flow.message.source, flow.message.target)
            if rate == flow.rate:
                continue
            if not math.isinf(flow.rate):
                flow.remaining -= flow.rate * (self.now - flow.since)
            flow.rate, flow.since = rate, self.now
            flow.turn += 1
            left = max(0.0, flow.remaining) / rate
            self._push(self.now + left, "end", flow, flow.turn)

    # ------------------------------------------------------------------- work

    def _look_at(self, rank: int) -> None:
        """Transfers of a rank are slower beside its work."""
        busy = (rank, COMPUTE) in self._running
        if busy != self._busy[rank]:
            self._busy[rank] = busy
            self._hurried[rank] = None

    def _change_speed(self, rank: int) -> None:
        running = [(rank, engine) for engine in _STREAMS if (rank, engine) in self._running]
        disturbed = bool(self._transfers[rank]) or len(running) > 1
        rate = 1.0 - self.slowdown if disturbed else 1.0
        for key in running:
            work = self._running[key]
            if work.rate == rate:
                continue
            work.remaining = max(0.0, work.remaining - work.rate * (self.now - work.since))
            work.since, work.rate = self.now, rate
            # Turns are unique in a simulation, so that an event of finished work is never taken
            # for one of the next.
            self._turns += 1
            work.turn = self._turns
            self._push(self.now + work.remaining / rate, "work", key, work.turn)
