"""What has to hold for every simulated timeline, whatever was simulated.

1. An engine or a lane does one thing at a time, in the order of the launches.
2. A transfer takes at least its latency and the time that its bytes need on its links alone, and a
   link never carries more than its capacity over any interval between transfers.
3. Everything starts as soon as the last of what it waits for is done, and not before: work and
   exchanges after their launch and the operations before them, a transfer after both of its ends.
4. Every planned byte is moved, once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from commfuse_npu.tools.simulate.engine import Timeline
from commfuse_npu.tools.simulate.group import Played
from commfuse_npu.tools.simulate.launches import Operation
from commfuse_npu.tools.simulate.links import LinkId, Links

_SLACK = 1e-9
"""Relative to the time of the step; events are added up in floating point."""

Launches = Sequence[Sequence[Operation]]


def problems(timeline: Timeline, launches: Launches, links: Links) -> list[str]:
    """What does not hold, in words; empty if everything does."""
    slack = _SLACK * max(timeline.seconds, 1e-12)
    return [
        *_busy_twice(timeline, slack),
        *_links(timeline, links, slack),
        *_starts(timeline, launches, links, slack),
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
        for link in links.path(moved.message.source, moved.message.target):
            carried[link].append(moved)
        path = links.path(moved.message.source, moved.message.target)
        least = max(moved.message.size / links.capacity(link) for link in path)
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


def _starts(timeline: Timeline, launches: Launches, links: Links, slack: float) -> Iterator[str]:
    spans = {(span.rank, span.index): span for span in timeline.spans}
    ends = defaultdict(list)
    for rank, operations in enumerate(launches):
        launched, last = 0.0, dict[str, int]()
        for index, one in enumerate(operations):
            launched += one.host(links.machine)
            needs = {*one.after, *([last[one.engine]] if one.engine in last else [])}
            if one.engine is not None:
                last[one.engine] = index
            here = spans[rank, index]
            due = max([launched, *(spans[rank, need].end for need in needs)])
            if abs(here.start - due) > slack:
                yield f"{one.name!r} of rank {rank} starts at {here.start:g} s, not at {due:g} s"
            for message in (*one.sends, *one.receives):
                ends[message.key].append(here)
    for moved in timeline.moved:
        message = moved.message
        ready = max(span.start for span in ends[message.key])
        latency = links.latency(message.source, message.target) + message.delay
        if max(abs(moved.ready - ready), abs(moved.start - ready - latency)) > slack:
            yield f"{message} starts at {moved.start:g} s, {latency:g} s after {ready:g} s"
    done = {moved.message.key: moved.end for moved in timeline.moved}
    for span in timeline.spans:
        one = span.operation
        parts = [done.get(m.key, span.end) for m in (*one.sends, *one.receives)]
        due = max(parts, default=span.start + one.seconds)
        if span.end < due - slack or (parts and span.end > due + slack):
            yield f"{one.name!r} of rank {span.rank} ends at {span.end:g} s, not at {due:g} s"
    last_end = max(span.end for span in timeline.spans)
    if abs(last_end - timeline.seconds) > slack:
        yield f"the last operation ends at {last_end:g} s, the step at {timeline.seconds:g} s"


def _bytes(timeline: Timeline, launches: Launches) -> Iterator[str]:
    planned = Counter({m.key: m.size for rank in launches for op in rank for m in op.sends})
    done = Counter(moved.message.key for moved in timeline.moved)
    for key, size in planned.items():
        if done[key] != 1:
            yield f"transfer {key} of {size:g} bytes was carried out {done[key]} times"


def sent(operations: Sequence[Operation]) -> float:
    """Bytes that a rank sends."""
    return sum(message.size for operation in operations for message in operation.sends)


def work(played: Played) -> float:
    """Seconds that the busiest compute engine has work, at full speed."""
    return max(sum(operation.seconds for operation in rank) for rank in played.launches)
