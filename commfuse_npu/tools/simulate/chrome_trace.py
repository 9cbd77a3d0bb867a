"""Timelines for chrome://tracing and Perfetto: a process per rank, a thread per engine or link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commfuse_npu.tools.simulate.group import Played
from commfuse_npu.tools.simulate.lanes import LANES, sent_by
from commfuse_npu.tools.simulate.launches import COMPUTE
from commfuse_npu.tools.simulate.names import name

__all__ = ["chrome_trace"]


def chrome_trace(
    parts: Sequence[tuple[str, Played]], layers: int = 1, about: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """The parts one after the other, in the Trace Event Format; times in microseconds.

    All of a layer is there, whether it is fused or not.

    Args:
        layers: how many like this one a step has.
        about: what is traced; in the file as ``otherData``.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}

    def label(what: str, rank: int, thread: int, **value: object) -> None:
        events.append({"name": what, "ph": "M", "pid": rank, "tid": thread, "args": value})

    def thread(rank: int, row: str) -> int:
        if (rank, row) not in threads:
            # The layer on top, then the compute engine, then lanes, then links.
            number = sum(1 for known, _ in threads if known == rank)
            threads[rank, row] = number
            label("thread_name", rank, number, name=row)
            label("thread_sort_index", rank, number, sort_index=number)
        return threads[rank, row]

    def event(
        said: str, part: str, rank: int, row: str, start: float, end: float, **more: object
    ) -> None:
        place = {"pid": rank, "tid": thread(rank, row)}
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        args = {"iteration": 1, "part": part, **more}
        events.append({"name": said, "cat": part, "ph": "X", **place, **times, "args": args})

    offset = 0.0
    whole = all(played.links.folded for _, played in parts)
    stands_for = f", as all {parts[0][1].links.size} ranks" if whole else ""
    for rank in range(max(len(played.launches) for _, played in parts)):
        label("process_name", rank, 0, name=f"rank {rank}{stands_for}, simulated")
    for part, played in parts:
        for rank in range(len(played.launches)):
            said = f"iteration 1, layer 1 of {layers}, {part}"
            end = offset + played.seconds
            event(said, part, rank, "layer", offset, end, layer=1)
            thread(rank, LANES[COMPUTE])
        for span in played.timeline.spans:
            engine = span.operation.engine
            if engine is not None and span.end > span.start:
                start, end = offset + span.start, offset + span.end
                row = LANES.get(engine, engine)
                event(name(span.operation), part, span.rank, row, start, end, layer=1)
        senders = sent_by(played.timeline)
        for moved in played.timeline.moved:
            message, start, end = moved.message, offset + moved.start, offset + moved.end
            operation = senders[message.key]
            row = f"link to rank {message.target}"
            sent = {"layer": 1, "bytes": message.size, "to": message.target}
            # One that stands for all is in the middle, and has the first place.
            place = 0 if played.links.folded else message.source
            event(name(operation), part, place, row, start, end, **sent)
        offset += played.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
