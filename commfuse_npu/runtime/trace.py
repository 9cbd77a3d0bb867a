"""What happened when on each rank: posts, waits, work.

:mod:`commfuse_npu.tools.trace_file` writes it for chrome://tracing and Perfetto.

Off unless a :class:`Trace` is put on a transport; then each event costs a tuple in a list.  The
viewer shows a process per rank with these rows, the same as for simulated steps
(:mod:`commfuse_npu.tools.simulate.chrome_trace`) as far as there is such a thing in a simulation:

====================  ==========================================================================
``compute``           the pieces of work between transfers, by the rows that they are about
``waiting``           the host in a wait for a transfer
``from rank k``       a message from when its receive was posted to when it was waited for: it
                      arrived in between, and at the end of a wait that took any time
``link to rank k``    the same of a send
====================  ==========================================================================

On a device posts and waits return at once and what is shown is the host's time; use the device's
profiler for the streams.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Event", "Trace", "clock"]


class Event(NamedTuple):
    """Something that took time on one rank; ``start`` and ``end`` in ns of :func:`clock`."""

    row: str
    name: str
    operation: str
    start: int
    end: int
    bytes: int = 0


def clock() -> int:
    """Nanoseconds of a clock that never jumps; its zero is each machine's own."""
    return time.monotonic_ns()


class Trace:
    """Events of one rank, in memory.

    Args:
        limit: no more than so many; what comes later is counted only.

    Attributes:
        left_out: how many did not fit.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.events: list[Event] = []
        self.left_out = 0
        self._limit = limit
        self._free: dict[str, int] = {}

    def add(self, row: str, name: str, operation: str, start: int, end: int, size: int = 0) -> None:
        """Keep an event."""
        if len(self.events) < self._limit:
            self.events.append(Event(row, name, operation, start, end, size))
        else:
            self.left_out += 1

    def add_in_order(
        self, row: str, name: str, operation: str, start: int, end: int, size: int
    ) -> None:
        """Keep a message of a link that carries one after the other: it begins after the last."""
        start = max(start, self._free.get(row, start))
        self._free[row] = end
        self.add(row, name, operation, start, end, size)

    @contextmanager
    def span(self, row: str, name: str, operation: str) -> Iterator[None]:
        """Around work that takes its time on the host."""
        start = clock()
        try:
            yield
        finally:
            self.add(row, name, operation, start, clock())
