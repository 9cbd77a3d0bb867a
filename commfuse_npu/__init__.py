"""Splits the collectives of distributed training and overlaps them with computation.

An implementation of CommFuse (arXiv 2604.24013) for Ascend NPUs; everything also runs on CPU with
gloo, where it is tested.  Imports point down: ops -> runtime -> plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commfuse_npu.plan import PlanError, Schedule

if TYPE_CHECKING:
    from commfuse_npu.runtime.agreement import MismatchError, TransportError
    from commfuse_npu.runtime.transport import Transport

__all__ = [
    "MismatchError",
    "PlanError",
    "Schedule",
    "Transport",
    "TransportError",
    "__version__",
]

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    """Import the transport on demand: it needs torch, and tools that check for torch must not."""
    if name in ("MismatchError", "Transport", "TransportError"):
        from commfuse_npu.runtime import agreement, transport

        return getattr(transport if name == "Transport" else agreement, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
