"""What goes where in which step, as data: schedules, and the plan of each rank.  No torch."""

from __future__ import annotations

from commfuse_npu.plan.block_order import Own
from commfuse_npu.plan.schedule import (
    Kind,
    Order,
    Piece,
    Plan,
    PlanError,
    Schedule,
    Shape,
    Step,
    Transfer,
    split,
    taper_down,
)

__all__ = [
    "Kind",
    "Order",
    "Own",
    "Piece",
    "Plan",
    "PlanError",
    "Schedule",
    "Shape",
    "Step",
    "Transfer",
    "split",
    "taper_down",
]
