"""Forward-backward overlap: passes of micro-batches take turns at their transfers."""

from __future__ import annotations

from commfuse_npu.overlap.forward_backward import ForwardBackwardOverlap
from commfuse_npu.overlap.states import Attributes, PassState, RandomState
from commfuse_npu.overlap.turns import OtherPassError
from commfuse_npu.removed import missing_name

__all__ = ["Attributes", "ForwardBackwardOverlap", "OtherPassError", "PassState", "RandomState"]


def __getattr__(name: str) -> None:
    raise missing_name(__name__, name)
