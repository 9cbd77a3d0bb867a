"""Schedules, and the programs that rules compile from them for each rank.  Imports no torch."""

from __future__ import annotations

from commfuse_npu.plan.defaults import (
    DATA_PARALLEL_LANES,
    block_rows,
    min_rows_to_fuse,
    usual_chunks,
    usual_shape,
)
from commfuse_npu.plan.schedule import Place, PlanError, Schedule, split, taper_down

__all__ = [
    "DATA_PARALLEL_LANES",
    "Place",
    "PlanError",
    "Schedule",
    "block_rows",
    "min_rows_to_fuse",
    "split",
    "taper_down",
    "usual_chunks",
    "usual_shape",
]
