"""Schedules, and the programs that rules compile from them for each rank.  Imports no torch."""

from __future__ import annotations

from commfuse_npu.plan.defaults import (
    DATA_PARALLEL_LANES,
    block_rows,
    least_rows,
    usual_chunks,
    usual_shape,
)
from commfuse_npu.plan.schedule import PlanError, RankSpec, Schedule, split, taper_down

__all__ = [
    "DATA_PARALLEL_LANES",
    "PlanError",
    "RankSpec",
    "Schedule",
    "block_rows",
    "least_rows",
    "split",
    "taper_down",
    "usual_chunks",
    "usual_shape",
]
