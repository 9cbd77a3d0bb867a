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
from collections.abc import Mapping
from typing import NamedTuple

from commfuse_npu.plan.program import Program

__all__ = ["Event", "Linear", "Origin", "Trace", "clock"]


class Linear(NamedTuple):
    """A linear layer by its name, and the layer of the model that it is in."""

    name: str
    layer: int | None = None


Origin = tuple[Program, int | str]
"""A program, and the place of an instruction there or what a message of it carries."""


class Event(NamedTuple):
    """Something that took time on one rank.

    Attributes:
        start, end: in ns of :func:`clock`.
        linear: whose weight it is about, if that is known.
        iteration: of the training, 0 if that is not known.
    """

    row: str
    operation: str
    start: int
    end: int
    origin: Origin
    bytes: int = 0
    linear: Linear | None = None
    iteration: int = 0


def clock() -> int:
    """Nanoseconds of a clock that never jumps; its zero is each machine's own."""
    return time.monotonic_ns()


class Trace:
    """Events of one rank, in memory.

    Args:
        limit: no more than so many; what comes later is counted only.
        linears: by the address of the weight
            (:func:`~commfuse_npu.tools.trace_file.linears_of`): what is about a weight is called
            after it.

    Attributes:
        left_out: how many did not fit.
        iteration: of the training, for whoever counts them.
    """

    def __init__(self, limit: int = 1_000_000, linears: Mapping[int, Linear] | None = None) -> None:
        self.events: list[Event] = []
        self.left_out = self.iteration = 0
        self.linears = linears or {}
        self._limit = limit
        self._free: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Keep an event, of this iteration."""
        if len(self.events) < self._limit:
            self.events.append(event._replace(iteration=self.iteration))
        else:
            self.left_out += 1

    def add_in_order(self, event: Event) -> None:
        """Keep a message of a link that carries one after the other: it begins after the last."""
        start = max(event.start, self._free.get(event.row, event.start))
        self._free[event.row] = event.end
        self.add(event._replace(start=start))
