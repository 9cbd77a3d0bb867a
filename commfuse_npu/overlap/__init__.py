"""Forward-backward overlap: passes of micro-batches take turns at their transfers."""

from __future__ import annotations

from commfuse_npu.overlap.forward_backward import ForwardBackwardOverlap
from commfuse_npu.overlap.states import Attributes, PassState, RandomState
from commfuse_npu.overlap.turns import OtherPassError

__all__ = ["Attributes", "ForwardBackwardOverlap", "OtherPassError", "PassState", "RandomState"]
