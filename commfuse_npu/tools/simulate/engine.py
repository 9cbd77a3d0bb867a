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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Message, Operation
from commfuse_npu.tools.simulate.links import LinkId, Links

__all__ = ["Moved", "SimulationError", "Span", "Timeline", "simulate"]

_STREAMS = COMPUTE, ASIDE


class SimulationError(RuntimeError):
    """The launches cannot be played to their end: ranks wait for each other, or for nobody."""


@dataclass(frozen=True, slots=True)
class Span:
    """An operation that was played, in seconds from the start."""

    rank: int
    index: int
    operation: Operation
    start: float
    end: float


class Moved(NamedTuple):
    """A transfer that was played.  ``ready``: both ends started; ``start``: after the latency."""

    message: Message
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What happened.  ``seconds``: until everything was done."""

    seconds: float
    spans: tuple[Span, ...]
    moved: tuple[Moved, ...]


class _Task:
    """An operation, what it still waits for, and how many of its transfers are left."""

    __slots__ = ("followers", "index", "left", "operation", "rank", "start", "waits")

    def __init__(self, rank: int, index: int, operation: Operation) -> None:
        self.rank, self.index, self.operation = rank, index, operation
        self.left = len(operation.sends) + len(operation.receives)
        self.followers: list[_Task] = []
        self.waits, self.start = 0, math.nan


class _Running:
    """Work of a stream, or a transfer: how much of it is left, and how fast it goes."""

    __slots__ = ("left", "rate", "since", "turn")

    def __init__(self, left: float, now: float) -> None:
        self.left, self.rate, self.since, self.turn = left, 0.0, now, 0

    def change(self, rate: float, now: float) -> float:
        """Go on at another rate; the time of the end."""
        if not math.isinf(self.rate):
            self.left = max(0.0, self.left - self.rate * (now - self.since))
        self.rate, self.since = rate, now
        self.turn += 1
        return now + self.left / rate


class _Work(_Running):
    __slots__ = ("task",)

    def __init__(self, task: _Task, now: float) -> None:
        super().__init__(task.operation.seconds, now)
        self.task = task


class _Flow(_Running):
    __slots__ = ("links", "message", "ready", "start")

    def __init__(self, message: Message, links: tuple[LinkId, ...], now: float) -> None:
        super().__init__(message.size, now)
        self.message, self.links = message, links
        self.ready = self.start = now


def simulate(
    launches: Sequence[Sequence[Operation]], links: Links, *, launched: bool = False
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
        self, launches: Sequence[Sequence[Operation]], links: Links, launched: bool
    ) -> None:
        self.links = links
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any, int]] = []
        self._sequence = 0
        self._one_end: set[object] = set()
        self._ends: dict[object, list[_Task]] = {}
        self._on_link: dict[LinkId, dict[_Flow, None]] = {}
        self._capacity: dict[LinkId, float] = {}
        self._transfers: list[dict[_Flow, None]] = [{} for _ in launches]
        self._busy = [False] * len(launches)
        self._working: dict[tuple[int, str], _Work] = {}
        self._spans: list[Span] = []
        self._moved: list[Moved] = []
        self._shared_anew: dict[LinkId, None] = {}
        self._hurried: dict[int, None] = {}
        self._tasks = [
            task
            for rank, operations in enumerate(launches)
            for task in self._of_rank(rank, operations, launched)
        ]

    def _of_rank(self, rank: int, operations: Sequence[Operation], launched: bool) -> list[_Task]:
        tasks = [_Task(rank, *numbered) for numbered in enumerate(operations)]
        last: dict[str, int] = {}
        at = 0.0
        for task in tasks:
            operation = task.operation
            needs = set(operation.after)
            if operation.engine is not None:
                if operation.engine in last:
                    needs.add(last[operation.engine])
                last[operation.engine] = task.index
            for need in needs:
                tasks[need].followers.append(task)
            task.waits = len(needs)
            at += 0.0 if launched else operation.host(self.links.machine)
            if at > 0:
                task.waits += 1
                self._push(at, self._met, task, 0)
            for message in (*operation.sends, *operation.receives):
                self._ends.setdefault(message.key, []).append(task)
        return tasks

    def run(self) -> Timeline:
        for task in [one for one in self._tasks if not one.waits]:
            self._start(task)
        while self._events or self._shared_anew:
            # Once for all that begins and ends in an instant: a rank of a large group has a
            # transfer per peer, and each would share the link among all of them again.
            if not self._events or self._events[0][0] > self.now:
                self._set_rates()
            if not self._events:
                break
            time, _, happens, what, turn = heapq.heappop(self._events)
            if isinstance(what, _Running) and what.turn != turn:
                continue  # its rate has changed since
            self.now = time
            happens(what)
        if len(self._spans) < len(self._tasks):
            raise SimulationError(self._stuck())
        return Timeline(self.now, tuple(self._spans), tuple(self._moved))

    def _stuck(self) -> str:
        """Names the exchange that hangs first; the others wait behind it."""
        left = len(self._tasks) - len(self._spans)
        hanging = [one for one in self._tasks if not math.isnan(one.start) and one.left]
        if not hanging:
            return f"{left} operations wait for each other"
        first = min(hanging, key=lambda one: (one.start, one.rank, one.index))
        return (
            f"rank {first.rank} waits for ever in {first.operation.name!r} on "
            f"{first.operation.engine}: {first.left} transfers never began, because their other "
            f"ends never started; {left} operations are left"
        )

    def _push(self, time: float, happens: Callable[[Any], None], what: Any, turn: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, happens, what, turn))

    def _met(self, task: _Task) -> None:
        """One thing less that it waits for."""
        task.waits -= 1
        if task.waits == 0:
            self._start(task)

    def _start(self, task: _Task) -> None:
        operation = task.operation
        task.start = self.now
        if operation.engine in _STREAMS:
            self._working[task.rank, operation.engine] = _Work(task, self.now)
            self._change_speed(task.rank)
            self._look_at(task.rank)
            return
        if not task.left:
            self._done(task)
            return
        for message in (*operation.sends, *operation.receives):
            if message.key not in self._one_end:
                self._one_end.add(message.key)  # the other end begins it
                continue
            path = self.links.path(message.source, message.target)
            latency = self.links.latency(message.source, message.target)
            flow = _Flow(message, path, self.now)
            self._push(self.now + latency + message.delay, self._begin, flow, 0)

    def _done(self, task: _Task) -> None:
        self._spans.append(Span(task.rank, task.index, task.operation, task.start, self.now))
        for follower in task.followers:
            self._met(follower)

    # ------------------------------------------------------------------- transfers

    def _touched(self, message: Message) -> tuple[int, ...]:
        """The ranks whose memory a transfer reads or writes."""
        return (0,) if self.links.folded else (message.source, message.target)

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
        self._moved.append(Moved(flow.message, flow.ready, flow.start, self.now))
        for task in self._ends[flow.message.key]:
            task.left -= 1
            if task.left == 0:
                self._done(task)

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
            if rate != flow.rate:
                end = flow.change(rate, self.now)
                self._push(end, self._end, flow, flow.turn)

    # ------------------------------------------------------------------- work

    def _worked(self, work: _Work) -> None:
        rank, engine = work.task.rank, work.task.operation.engine
        assert engine is not None
        del self._working[rank, engine]
        self._change_speed(rank)
        self._done(work.task)
        self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        """Transfers of a rank are slower beside its work."""
        busy = (rank, COMPUTE) in self._working
        if busy != self._busy[rank]:
            self._busy[rank] = busy
            self._hurried[rank] = None

    def _change_speed(self, rank: int) -> None:
        of_rank = (self._working.get((rank, engine)) for engine in _STREAMS)
        working = [work for work in of_rank if work is not None]
        disturbed = bool(self._transfers[rank]) or len(working) > 1
        rate = 1.0 - self.links.machine.transfer_slowdown if disturbed else 1.0
        for work in working:
            if work.rate != rate:
                end = work.change(rate, self.now)
                self._push(end, self._worked, work, work.turn)
