"""Machines with round numbers, so that closed forms can be written down."""

from __future__ import annotations

import math
from dataclasses import replace

from commfuse_npu.hardware.machine import Level, LinkTopology, Machine

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
