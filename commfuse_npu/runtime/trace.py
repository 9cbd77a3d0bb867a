"""What happened when on each rank: posts, waits, work; for chrome://tracing and Perfetto.

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

Clocks of ranks differ.  :func:`write` measures by how much (a message there and back, the fastest
of many: the answer was read half way) and shows everything on rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from commfuse_npu.runtime.whole_file import write_json

if TYPE_CHECKING:
    from commfuse_npu.runtime.transport import Transport

__all__ = ["Event", "Trace", "clock", "events_of_viewer", "write"]

_PINGS = 20


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


def write(transport: Transport, path: Path) -> int:
    """Gather the traces of a group on its rank 0 and write them as one file.

    A collective of the group; ranks without a trace have no events.

    Args:
        path: rank 0's counts.

    Returns:
        how many events there are in all.

    Raises:
        OSError: rank 0 cannot write there; the others have returned.
        TransportError: a rank did not come in time.
    """
    behind = transport.clock_behind(_PINGS)
    trace = transport.trace or Trace()
    gathered = transport.share("trace", (trace.events, trace.left_out, behind))
    events = [
        [event._replace(start=event.start + late, end=event.end + late) for event in found]
        for found, _, late in gathered
    ]
    if transport.rank == 0:
        names = [f"rank {rank}, measured" for rank in transport.ranks]
        content = {
            "traceEvents": events_of_viewer(events, names),
            "displayTimeUnit": "ms",
            "otherData": {"left out": sum(left for _, left, _ in gathered)},
        }
        write_json(path, content)
    return sum(map(len, events))


def events_of_viewer(
    of_ranks: Sequence[Sequence[Event]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The Trace Event Format: a process per rank, a thread per row, times from the first event."""
    zero = min((event.start for events in of_ranks for event in events), default=0)
    found: list[dict[str, Any]] = []
    for rank, (events, name) in enumerate(zip(of_ranks, names, strict=True)):
        found.append(_about("process_name", rank, 0, name=name))
        rows = sorted({event.row for event in events}, key=_place)
        for number, row in enumerate(rows):
            found.append(_about("thread_name", rank, number, name=row))
            found.append(_about("thread_sort_index", rank, number, sort_index=number))
        for event in events:
            found.append(
                {
                    "name": event.name,
                    "cat": event.operation,
                    "ph": "X",
                    "pid": rank,
                    "tid": rows.index(event.row),
                    "ts": (event.start - zero) / 1e3,
                    "dur": (event.end - event.start) / 1e3,
                    "args": {"operation": event.operation}
                    | ({"bytes": event.bytes} if event.bytes else {}),
                }
            )
    return found


def _place(row: str) -> tuple[int, str]:
    order = ("compute", "waiting")
    return (order.index(row) if row in order else len(order), row)


def _about(what: str, rank: int, thread: int, **value: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": value}
