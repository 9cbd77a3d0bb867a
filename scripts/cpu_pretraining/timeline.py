"""A picture and a trace of one iteration of each form: what ran beside which transfer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.drawing import Bit, Chart, Row, Size, draw, gantt

OTHER = "other"
LINKS = "links"
WAITING = "waiting"
_PASSES = ("forward", "backward")
_ROWS = ("forward", "recomputation", "backward", "weight gradients", OTHER, LINKS)


class RecordedSpan(NamedTuple):
    """What a rank did, in seconds since the iteration's begin.

    ``row``: the kind of pass, :data:`OTHER` or :data:`LINKS`; ``name``: the row and the number of
    the micro-batch, from 1, or :data:`WAITING`, or of a transfer.
    """

    row: str
    name: str
    start: float
    end: float


Iterations = Mapping[str, Sequence[Sequence[RecordedSpan]]]
"""Of each form, by its name, the spans of each rank, in the order of their ends."""


def write_timelines(iterations: Iterations, title: str, folder: Path) -> str:
    """Write a picture and a trace; returns a line that names them, or why there is none.

    The trace has the name and the format of those that torch_npu's profiler writes.
    """
    picture = folder / "timelines.png"
    trace = folder / "trace_view.json"
    traced = "no trace"
    try:
        with atomic_write(trace) as part:
            part.write_text(json.dumps(list(trace_events(iterations))), encoding="utf-8")
        traced = f"trace: {trace} (Perfetto, MindStudio Insight)"
        draw(charts(iterations), title, picture)
    except (OSError, ValueError) as error:
        return f"{traced}; no picture: {getattr(error, 'strerror', None) or error}"
    return f"picture: {picture}; {traced}"


def trace_events(iterations: Iterations) -> Iterator[dict[str, Any]]:
    """Events of the Chrome trace format: a process per form and rank, a thread per row.

    Times are in microseconds.  A transfer is shown from the end of the one before it.
    """
    processes = [(f"{form}, rank {rank}", spans) for form, ranks in iterations.items()
                 for rank, spans in enumerate(ranks)]  # fmt: skip
    for process, (title, spans) in enumerate(processes):
        names = ("process_name", 0, title), *(("thread_name", *row) for row in enumerate(_ROWS))
        for name, thread, text in names:
            named = {"name": name, "args": {"name": text}}
            yield {"ph": "M", "pid": process, "tid": thread, **named}
        ends = dict.fromkeys(_ROWS, 0.0)
        for row, name, start, end in spans:
            start = max(start, ends[row])
            if start < end:
                ends[row] = end
                times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
                yield {"ph": "X", "pid": process, "tid": _ROWS.index(row), "name": name, **times}


def charts(iterations: Iterations) -> list[Chart]:
    """Passes of all ranks; below, what rank 0 did in the first backward and the forward after it.

    A pass is drawn from its begin to its end above, only while it runs or waits below.
    """
    passes = []
    pairs = []
    for form, ranks in iterations.items():
        for rank, spans in enumerate(ranks):
            waits = [span._replace(row=WAITING) for span in spans if span.name == WAITING]
            links = [span for span in spans if span.row == LINKS]
            names = {name: row for row, name, *_ in spans if row in _PASSES and name != WAITING}
            whole = [RecordedSpan(names[name], name, *_extent(spans, name)) for name in names]
            waited = sum(span.end - span.start for span in waits)
            title = f"{form}, rank {rank}: {_ms(spans[-1].end)}, waiting {_ms(waited)}"
            lanes = {row: row for row in (*_PASSES, WAITING, LINKS)}
            passes.append(_row(title, [*whole, *waits, *links], lanes))
        start, end = _extent(ranks[0], "backward 1", "forward 2")
        inside = [
            RecordedSpan(row, name, begin - start, until - start)
            for row, name, begin, until in ranks[0]
            if start <= begin and until <= end and row != OTHER
        ]
        lanes = {row: f"{row} 1" for row in _ROWS if any(row == span.row for span in inside)}
        lanes |= {"forward": "forward 2", LINKS: LINKS}
        pairs.append(_row(f"{form}: {_ms(end - start)}", inside, lanes))
    title = "The median iteration; numbers: micro-batches"
    return [
        gantt(title, "ms", passes, Size(13, 96, 310), legend=False),
        gantt("In detail: a backward and a forward, rank 0", "ms", pairs, Size(15, 96, 310)),
    ]


def _extent(spans: Sequence[RecordedSpan], *names: str) -> tuple[float, float]:
    inside = [span for span in spans if span.name in names]
    return min(span.start for span in inside), max(span.end for span in inside)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _row(title: str, spans: Sequence[RecordedSpan], lanes: Mapping[str, str]) -> Row:
    bits = []
    for row, name, start, end in spans:
        kind = WAITING if name == WAITING else row
        number = name.split()[-1] if kind in _PASSES and lanes[row] == row else ""
        bits.append(Bit(lanes[row], 1e3 * start, 1e3 * end, kind, number))
    return Row(title, tuple(lanes.values()), tuple(bits))
