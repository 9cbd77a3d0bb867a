"""Machines with round numbers, so that closed forms can be written down, and what runs on them."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.hardware.machine import Level, LinkTopology, Machine
from commfuse_npu.tools.simulate.engine import LinkId, Moved, Operation, Simulated, TimeSpan
from commfuse_npu.tools.simulate.variants import (
    COC,
    MC2,
    MEGATRON,
    REFERENCE,
    Variant,
    fused,
    tuned,
)

IDEAL = Machine(
    npus_per_node=64,
    cube_flops=1.0,
    gemm_efficiency=1.0,
    half_rows=0.0,
    cores=0,
    gemm_start=0.0,
    attention_efficiency=1.0,
    hbm_bandwidth=math.inf,
    transfer_slowdown=0.0,
    launch_overhead=0.0,
    post_overhead=0.0,
    event_overhead=0.0,
    inside=Level("full_mesh", 1.0, 0.0),
    between=None,
)
"""Links of 1 byte/s, no latency, no overhead, free memory."""


def ideal(
    topology: LinkTopology = "full_mesh",
    rate: float = 1.0,
    latency: float = 0.0,
    **more: object,
) -> Machine:
    return replace(IDEAL, inside=Level(topology, rate, latency), **more)  # type: ignore[arg-type]


def variants(lanes: int) -> list[Variant]:
    """Every kind of variant, and every kind of schedule."""
    base = Schedule("shifted", lanes)
    schedules = [replace(base, chunks=chunks) for chunks in (1, 2, 4)]
    schedules += [replace(base, chunks=6), replace(base, lanes=min(2, lanes))]
    schedules += [Schedule("collective", 1, chunks) for chunks in (1, 2)]
    return [
        REFERENCE,
        MEGATRON,
        *COC,
        MC2,
        *(fused(schedule) for schedule in schedules),
        fused(schedules[1], collectives_from=100),
        tuned(base, (1, 2)),
    ]


# ------------------------------------------------------------------- properties of every timeline

_SLACK = 1e-9
"""Relative to the time of the step; events are added up in floating point."""


def check_timeline(simulated: Simulated) -> None:
    """Properties that have to hold for every simulated timeline.

    1. Everything starts as soon as its last dependency is done, and not before: work and exchanges
       after their launch, the operations they depend on and earlier work of their engine; a
       transfer after both of its ends.
    2. A transfer takes at least its latency and the time that its bytes need on its links alone,
       and a link never carries more than its capacity over any interval between transfers.
    3. Every planned byte is moved, once.
    """
    links = simulated.links
    slack = _SLACK * max(simulated.device, 1e-12)
    done = {moved.message.key: moved.end for moved in simulated.moved}
    spans = {(span.rank, span.index): span for span in simulated.spans}
    at_ends: dict[object, list[TimeSpan]] = defaultdict(list)
    for rank, operations in enumerate(simulated.launches):
        launched, last = 0.0, dict[str, int]()
        for index, op in enumerate(operations):
            launched += op.host(links.machine)
            needs = {*op.after, *([last[op.engine]] if op.engine in last else [])}
            if op.engine is not None:
                last[op.engine] = index
            here = spans[rank, index]
            due = max([launched, *(spans[rank, need].end for need in needs)])
            assert abs(here.start - due) <= slack, f"{here} starts at another time than {due}"
            parts = [done.get(m.key, here.end) for m in (*op.sends, *op.receives)]
            earliest = max(parts, default=here.start + op.seconds)
            assert here.end >= earliest - slack, f"{here} ends before {earliest}"
            assert not parts or here.end <= earliest + slack, f"{here} ends after {earliest}"
            for message in (*op.sends, *op.receives):
                at_ends[message.key].append(here)
    assert abs(max(span.end for span in simulated.spans) - simulated.device) <= slack
    planned = {m.key for rank in simulated.launches for op in rank for m in op.sends}
    assert Counter(moved.message.key for moved in simulated.moved) == Counter(planned)
    rates: dict[LinkId, float] = {}
    carried: dict[LinkId, list[Moved]] = defaultdict(list)
    for moved in simulated.moved:
        message = moved.message
        level = links.level(message.source, message.target)
        begin = max(span.start for span in at_ends[message.key]) + level.latency + message.delay
        assert abs(moved.start - begin) <= slack, f"{moved} starts at another time than {begin}"
        alone = message.size / level.rate
        assert moved.end - moved.start >= alone - slack, f"{moved} takes less than {alone}"
        for link in links.path(message.source, message.target):
            rates[link] = level.rate
            carried[link].append(moved)
    for link, flows in carried.items():
        # From the first start to the last end of flows that overlap in time.
        flows.sort(key=lambda moved: moved.start)
        begin, end, load = flows[0].start, flows[0].end, 0.0
        for flow in flows:
            if flow.start > end:
                begin, load = flow.start, 0.0
            end, load = max(end, flow.end), load + flow.message.size
            assert load <= rates[link] * (end - begin + slack), f"{link} is too fast"


def sent(operations: Sequence[Operation]) -> float:
    """Bytes that a rank sends."""
    return sum(message.size for operation in operations for message in operation.sends)


def work(simulated: Simulated) -> float:
    """Seconds that the busiest compute engine has work, at full speed."""
    return max(sum(operation.seconds for operation in rank) for rank in simulated.launches)
