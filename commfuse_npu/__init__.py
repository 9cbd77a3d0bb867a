"""Collectives of tensor-parallel training, taken apart and hidden behind the work they feed.

An implementation of CommFuse (arXiv 2604.24013) for Ascend NPUs, with a CPU/gloo form on which
everything runs and is tested.  Imports point down: ops -> pipeline -> transport -> plan.
"""

from __future__ import annotations

from commfuse_npu.plan import Plan, PlanError, Schedule
from commfuse_npu.transport import MismatchError, Transport, TransportError

__all__ = [
    "MismatchError",
    "Plan",
    "PlanError",
    "Schedule",
    "Transport",
    "TransportError",
    "__version__",
]

__version__ = "0.1.0"
