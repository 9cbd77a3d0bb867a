"""What has to hold for every simulated timeline, whatever was simulated.

1. An engine or a lane does one thing at a time, in the order of the launches.
2. A transfer takes at least its latency and the time that its bytes need on its links alone, and a
   link never carries more than its capacity over any interval between transfers.
3. The critical path, followed back through causes, is contiguous: its pieces add up to the time of
   the step.
4. Every planned byte is moved, once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from commfuse_npu.tools.simulate.engine import Cause, Timeline
from commfuse_npu.tools.simulate.group import Played
from commfuse_npu.tools.simulate.launches import Launches
from commfuse_npu.tools.simulate.links import LinkId, Links

_SLACK = 1e-9
"""Relative to the time of the step; events are added up in floating point."""


def problems(timeline: Timeline, launches: Sequence[Launches], links: Links) -> list[str]:
    """What does not hold, in words; empty if everything does."""
    slack = _SLACK * max(timeline.seconds, 1e-12)
    return [
        *_busy_twice(timeline, slack),
        *_links(timeline, links, slack),
        *_path(timeline, slack),
        *_bytes(timeline, launches),
    ]


def _busy_twice(timeline: Timeline, slack: float) -> Iterator[str]:
    engines = defaultdict(list)
    for span in timeline.spans:
        if span.operation.engine is not None:
            engines[span.rank, span.operation.engine].append(span)
    for (rank, engine), spans in engines.items():
        spans.sort(key=lambda span: span.index)
        for before, after in pairwise(spans):
            if after.start < before.end - slack:
                yield (
                    f"{engine} of rank {rank} is busy twice: {after.operation.name!r} starts at "
                    f"{after.start:g} s, {before.operation.name!r} ends at {before.end:g} s"
                )


def _links(timeline: Timeline, links: Links, slack: float) -> Iterator[str]:
    carried = defaultdict(list)
    for moved in timeline.moved:
        for link in moved.links:
            carried[link].append(moved)
        least = max(moved.message.size / links.capacity(link) for link in moved.links)
        if moved.end - moved.start < least - slack:
            yield f"{moved.message} takes {moved.end - moved.start:g} s, less than {least:g} s"
    for link, flows in carried.items():
        # Between the first start and the last end of flows that touch each other in time.
        flows.sort(key=lambda moved: moved.start)
        begin, end, load = flows[0].start, flows[0].end, 0.0
        for flow in flows:
            if flow.start > end:
                yield from _overloaded(link, links, load, end - begin + slack)
                begin, load = flow.start, 0.0
            end, load = max(end, flow.end), load + flow.message.size
        yield from _overloaded(link, links, load, end - begin + slack)


def _overloaded(link: LinkId, links: Links, load: float, seconds: float) -> Iterator[str]:
    if load > links.capacity(link) * seconds:
        yield f"link {link} carries {load:g} bytes in {seconds:g} s"


def critical_path(timeline: Timeline) -> list[tuple[str, float, float]]:
    """What the step's time consists of, one after the other: name, start and end in seconds."""
    spans = {(span.rank, span.index): span for span in timeline.spans}
    pieces = []
    last = max(timeline.spans, key=lambda span: span.end)
    cause = Cause("operation", last.rank, last.index)
    while cause.kind == "operation":
        span = spans[cause.rank, cause.number]
        if span.ended_by is None:
            pieces.append((span.operation.name, span.start, span.end))
        else:
            moved = timeline.moved[span.ended_by]
            pieces.append((f"transfer in {span.operation.name}", moved.ready, moved.end))
            # The end that started last held the transfer up.
            span = spans[moved.cause.rank, moved.cause.number]
        cause = span.cause
        if cause.kind == "host":
            pieces.append(("launching", 0.0, span.start))
    return pieces[::-1]


def _path(timeline: Timeline, slack: float) -> Iterator[str]:
    time = 0.0
    for name, start, end in critical_path(timeline):
        if abs(start - time) > slack:
            yield f"the critical path has a gap before {name!r}, from {time:g} to {start:g} s"
        time = end
    if abs(time - timeline.seconds) > slack:
        yield f"the critical path ends at {time:g} s, the step at {timeline.seconds:g} s"


def _bytes(timeline: Timeline, launches: Sequence[Launches]) -> Iterator[str]:
    planned = Counter(
        {m.key: m.size for rank in launches for op in rank.operations for m in op.sends}
    )
    done = Counter(moved.message.key for moved in timeline.moved)
    for key, size in planned.items():
        if done[key] != 1:
            yield f"transfer {key} of {size:g} bytes was carried out {done[key]} times"


def sent(launches: Launches) -> float:
    """Bytes that a rank sends."""
    return sum(message.size for operation in launches.operations for message in operation.sends)


def work(played: Played) -> float:
    """Seconds that the busiest compute engine has work, at full speed."""
    return max(sum(operation.seconds for operation in rank.operations) for rank in played.launches)
