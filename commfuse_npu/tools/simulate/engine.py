"""Discrete-event simulation of the launches of a group's ranks on the links of a machine.

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

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Message, Operation
from commfuse_npu.tools.simulate.links import LinkId, Links

__all__ = ["Moved", "Span", "Timeline", "simulate"]

_STREAMS = COMPUTE, ASIDE


@dataclass(frozen=True, slots=True)
class Span:
    """A simulated operation; times in seconds from the start."""

    rank: int
    index: int
    operation: Operation
    start: float
    end: float


class Moved(NamedTuple):
    """A simulated transfer.  ``ready``: both ends have started; ``start``: after the latency."""

    message: Message
    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation.  ``seconds``: the time at which everything is complete."""

    seconds: float
    spans: tuple[Span, ...]
    moved: tuple[Moved, ...]


class _Task:
    """An operation, the number of its open dependencies, and of its unfinished transfers."""

    __slots__ = ("followers", "index", "open_transfers", "operation", "rank", "start", "waits")

    def __init__(self, rank: int, index: int, operation: Operation) -> None:
        self.rank, self.index, self.operation = rank, index, operation
        self.open_transfers = len(operation.sends) + len(operation.receives)
        self.followers: list[_Task] = []
        self.waits, self.start = 0, math.nan


class _Running:
    """Work of a stream, or a transfer: the remaining amount, and its current rate."""

    __slots__ = ("rate", "remaining", "since", "turn")

    def __init__(self, remaining: float, now: float) -> None:
        self.remaining, self.rate, self.since, self.turn = remaining, 0.0, now, 0

    def change(self, rate: float, now: float) -> float:
        """Continue at another rate; returns the new end time."""
        if not math.isinf(self.rate):
            self.remaining = max(0.0, self.remaining - self.rate * (now - self.since))
        self.rate, self.since = rate, now
        self.turn += 1
        return now + self.remaining / rate


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
    """Run the launches of ranks ``0, 1, ...`` to completion.

    Args:
        launches: operations of each rank; folded operations of one rank if the links are folded.
        launched: whether the hosts have launched everything at time 0; otherwise they start then.
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
        self._changed_links: dict[LinkId, None] = {}
        self._busy_changed: dict[int, None] = {}
        self._tasks = [
            task
            for rank, operations in enumerate(launches)
            for task in self._tasks_of(rank, operations, launched)
        ]

    def _tasks_of(self, rank: int, operations: Sequence[Operation], launched: bool) -> list[_Task]:
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
                self._push(at, self._count_down, task, 0)
            for message in (*operation.sends, *operation.receives):
                self._ends.setdefault(message.key, []).append(task)
        return tasks

    def run(self) -> Timeline:
        for task in [task for task in self._tasks if not task.waits]:
            self._start(task)
        while self._events or self._changed_links:
            # Set rates once per instant: each rank of a large group has one transfer per peer, and
            # recomputing the link shares for each of them would be slow.
            if not self._events or self._events[0][0] > self.now:
                self._set_rates()
            if not self._events:
                break
            time, _, action, subject, turn = heapq.heappop(self._events)
            if isinstance(subject, _Running) and subject.turn != turn:
                continue  # superseded: the rate has changed since
            self.now = time
            action(subject)
        left = len(self._tasks) - len(self._spans)
        assert not left, f"{left} operations wait for each other, or for an end that never starts"
        return Timeline(self.now, tuple(self._spans), tuple(self._moved))

    def _push(self, time: float, action: Callable[[Any], None], subject: Any, turn: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, action, subject, turn))

    def _count_down(self, task: _Task) -> None:
        """Count down the dependencies of a task, and start it after the last one."""
        task.waits -= 1
        if task.waits == 0:
            self._start(task)

    def _start(self, task: _Task) -> None:
        operation = task.operation
        task.start = self.now
        if operation.engine in _STREAMS:
            self._working[task.rank, operation.engine] = _Work(task, self.now)
            self._change_speed(task.rank)
            self._update_busy(task.rank)
            return
        if not task.open_transfers:
            self._done(task)
            return
        for message in (*operation.sends, *operation.receives):
            if message.key not in self._one_end:
                self._one_end.add(message.key)  # the transfer begins when the other end starts
                continue
            path = self.links.path(message.source, message.target)
            latency = self.links.latency(message.source, message.target)
            flow = _Flow(message, path, self.now)
            self._push(self.now + latency + message.delay, self._begin, flow, 0)

    def _done(self, task: _Task) -> None:
        self._spans.append(Span(task.rank, task.index, task.operation, task.start, self.now))
        for follower in task.followers:
            self._count_down(follower)

    # ------------------------------------------------------------------- transfers

    def _touched(self, message: Message) -> tuple[int, ...]:
        """The ranks whose memory a transfer reads or writes."""
        if self.links.folded:
            return (0,)
        ends = message.source, message.target
        return ends if ends[0] != ends[1] else ends[:1]

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
        self._changed_links.update(dict.fromkeys(flow.links))

    def _end(self, flow: _Flow) -> None:
        for link in flow.links:
            del self._on_link[link][flow]
        for rank in self._touched(flow.message):
            del self._transfers[rank][flow]
            if not self._transfers[rank]:
                self._change_speed(rank)
        self._changed_links.update(dict.fromkeys(flow.links))
        self._moved.append(Moved(flow.message, flow.ready, flow.start, self.now))
        for task in self._ends[flow.message.key]:
            task.open_transfers -= 1
            if task.open_transfers == 0:
                self._done(task)

    def _set_rates(self) -> None:
        """Update the rates of all transfers whose links or ends have changed."""
        affected = {flow: None for link in self._changed_links for flow in self._on_link[link]}
        for rank in self._busy_changed:
            affected |= self._transfers[rank]
        self._changed_links.clear()
        self._busy_changed.clear()
        for flow in affected:
            rate = min(self._capacity[link] / len(self._on_link[link]) for link in flow.links)
            if any(self._busy[rank] for rank in self._touched(flow.message)):
                rate /= self.links.beside_work(flow.message.source, flow.message.target)
            if rate != flow.rate:
                end = flow.change(rate, self.now)
                self._push(end, self._end, flow, flow.turn)

    # ------------------------------------------------------------------- work

    def _finish_work(self, work: _Work) -> None:
        rank, engine = work.task.rank, work.task.operation.engine
        assert engine is not None
        del self._working[rank, engine]
        self._change_speed(rank)
        self._done(work.task)
        self._update_busy(rank)

    def _update_busy(self, rank: int) -> None:
        """Mark a rank whose first stream became busy or idle: its transfers change their rate."""
        busy = (rank, COMPUTE) in self._working
        if busy != self._busy[rank]:
            self._busy[rank] = busy
            self._busy_changed[rank] = None

    def _change_speed(self, rank: int) -> None:
        of_rank = (self._working.get((rank, engine)) for engine in _STREAMS)
        working = [work for work in of_rank if work is not None]
        disturbed = bool(self._transfers[rank]) or len(working) > 1
        rate = 1.0 - self.links.machine.transfer_slowdown if disturbed else 1.0
        for work in working:
            if work.rate != rate:
                end = work.change(rate, self.now)
                self._push(end, self._finish_work, work, work.turn)
