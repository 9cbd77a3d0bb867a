"""Timelines for chrome://tracing and Perfetto: a process per rank, a thread per engine or link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commfuse_npu.tools.simulate.group import Played

__all__ = ["beside", "chrome_trace", "read_trace"]


def chrome_trace(parts: Sequence[tuple[str, Played]]) -> dict[str, Any]:
    """The parts one after the other, in the Trace Event Format; times in microseconds."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}

    def about(what: str, rank: int, thread: int, **value: object) -> None:
        events.append({"name": what, "ph": "M", "pid": rank, "tid": thread, "args": value})

    def thread(rank: int, name: str) -> int:
        if (rank, name) not in threads:
            # The compute engine on top, then lanes, then links.
            number = sum(1 for known, _ in threads if known == rank)
            threads[rank, name] = number
            about("thread_name", rank, number, name=name)
            about("thread_sort_index", rank, number, sort_index=number)
        return threads[rank, name]

    def event(
        name: str, part: str, rank: int, row: str, start: float, end: float, **more: object
    ) -> None:
        place = {"pid": rank, "tid": thread(rank, row)}
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        events.append({"name": name, "cat": part, "ph": "X", **place, **times, "args": more})

    offset = 0.0
    whole = all(played.links.folded for _, played in parts)
    stands_for = f", as all {parts[0][1].links.size} ranks" if whole else ""
    for rank in range(max(len(played.launches) for _, played in parts)):
        about("process_name", rank, 0, name=f"rank {rank}{stands_for}, simulated")
    for part, played in parts:
        for rank in range(len(played.launches)):
            thread(rank, "compute")
        for span in played.timeline.spans:
            engine = span.operation.engine
            if engine is not None and span.end > span.start:
                start, end = offset + span.start, offset + span.end
                event(span.operation.name, part, span.rank, engine, start, end)
        for moved in played.timeline.moved:
            message, start, end = moved.message, offset + moved.start, offset + moved.end
            name, row = f"{message.key[0]}", f"link to rank {message.target}"
            sent = {"bytes": message.size, "to": message.target}
            # One that stands for all is in the middle, and has the first place.
            place = 0 if played.links.folded else message.source
            event(name, part, place, row, start, end, **sent)
        offset += played.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_trace(content: Any) -> dict[str, Any]:
    """``content`` if it is a trace as :func:`commfuse_npu.tools.trace_file.write` makes them.

    Raises:
        ValueError: it is not.
    """
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(
        isinstance(event, dict) and isinstance(event.get("pid"), int) for event in events
    ):
        raise ValueError("it is not a trace: a mapping with traceEvents, each with a number as pid")
    return dict(content)


def beside(simulated: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Both traces in one: the measured processes follow the simulated ones."""
    first = 1 + max((event["pid"] for event in simulated["traceEvents"]), default=-1)
    moved = [{**event, "pid": first + event["pid"]} for event in measured["traceEvents"]]
    return {**simulated, "traceEvents": [*simulated["traceEvents"], *moved]}
