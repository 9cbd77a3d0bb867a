"""Machines with round numbers, so that closed forms can be written down, and what runs on them."""

from __future__ import annotations

import math
from dataclasses import replace

from commfuse_npu.hardware.machine import Level, LinkTopology, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.variants import COC, MC2, MEGATRON, REFERENCE, Variant, fused

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
    batched=True,
)
"""Links of 1 byte/s, no latency, no overhead, free memory."""


def ideal(
    topology: LinkTopology = "full_mesh",
    rate: float = 1.0,
    latency: float = 0.0,
    **more: object,
) -> Machine:
    return replace(IDEAL, inside=Level(topology, rate, latency), **more)  # type: ignore[arg-type]


def variants(size: int, lanes: int, two_level: int | None = None) -> list[Variant]:
    """Every kind of variant for a group, and every kind of schedule; ``two_level``: its node."""
    shape = "two_level" if two_level else "shifted"
    base = Schedule(shape, lanes, node_size=two_level)
    schedules = [replace(base, chunks=chunks) for chunks in (1, 2, 4)]
    schedules += [replace(base, chunks=6, taper=1.5), replace(base, lanes=min(2, lanes))]
    if two_level is None:
        schedules += [Schedule("collective", 1, chunks) for chunks in (1, 2)]
    return [
        REFERENCE,
        MEGATRON,
        *COC,
        *([MC2] if two_level is None else []),
        *(fused(schedule) for schedule in schedules),
        fused(schedules[1], collectives_from=100),
        fused(base, tuned=(1, 2)),
        fused(base, tuned=(1, 2), rounded=True),
    ]
