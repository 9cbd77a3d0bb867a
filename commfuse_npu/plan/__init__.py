"""Schedules, and the programs that rules compile from them for each rank.  Imports no torch."""

from __future__ import annotations

from commfuse_npu.plan.defaults import (
    DATA_PARALLEL_LANES,
    block_rows,
    default_chunks,
    default_shape,
    min_rows_to_fuse,
)
from commfuse_npu.plan.schedule import PlanError, RankSpec, Schedule, split
from commfuse_npu.removed import missing_name

__all__ = [
    "DATA_PARALLEL_LANES",
    "PlanError",
    "RankSpec",
    "Schedule",
    "block_rows",
    "default_chunks",
    "default_shape",
    "min_rows_to_fuse",
    "split",
]


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
