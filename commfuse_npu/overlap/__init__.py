"""Forward-backward overlap: two micro-batches take turns at their transfers."""

from __future__ import annotations

from commfuse_npu.overlap.pair import ForwardBackwardOverlap
from commfuse_npu.overlap.states import Attributes, RandomState, SideState
from commfuse_npu.overlap.turns import OtherSideError
from commfuse_npu.plan.turn_order import HandOverPoint, Order

__all__ = [
    "Attributes",
    "ForwardBackwardOverlap",
    "HandOverPoint",
    "Order",
    "OtherSideError",
    "RandomState",
    "SideState",
]
