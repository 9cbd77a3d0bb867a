"""The traces of a group as one file for chrome://tracing and Perfetto, on one clock.

Clocks of ranks differ.  :func:`write` measures by how much (a message there and back, the fastest
of many: the answer was read half way) and shows everything on rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.trace import Event, Trace
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.runtime.whole_file import write_json

__all__ = ["events_of_viewer", "write"]

_PINGS = 20


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
