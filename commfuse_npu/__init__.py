"""Splits the collectives of distributed training and overlaps them with computation.

An implementation of CommFuse (arXiv 2604.24013) for Ascend NPUs; everything also runs on CPU with
gloo, where it is tested.  Imports point down: ops, overlap -> runtime -> kernels, plan; launch and
proof -> plan; tools -> all but ops and overlap.  What needs torch is imported at its first use,
because tools that check for torch do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commfuse_npu.plan import PlanError, Schedule

if TYPE_CHECKING:
    from commfuse_npu.ops import (
        Buckets,
        Documents,
        LinearOptions,
        all_gather_linear,
        all_to_all_linear,
        attention_all_to_all,
        attention_linear_reduce_scatter,
        linear_all_reduce,
        linear_all_to_all,
        linear_reduce_scatter,
    )
    from commfuse_npu.overlap import ForwardBackwardOverlap
    from commfuse_npu.runtime.agreement import MismatchError, TransportError
    from commfuse_npu.runtime.transport import Transport

__all__ = [
    "Buckets",
    "Documents",
    "ForwardBackwardOverlap",
    "LinearOptions",
    "MismatchError",
    "PlanError",
    "Schedule",
    "Transport",
    "TransportError",
    "__version__",
    "all_gather_linear",
    "all_to_all_linear",
    "attention_all_to_all",
    "attention_linear_reduce_scatter",
    "linear_all_reduce",
    "linear_all_to_all",
    "linear_reduce_scatter",
]

__version__ = "0.3.0"

_ELSEWHERE = {
    "ForwardBackwardOverlap": "overlap",
    "MismatchError": "runtime.agreement",
    "Transport": "runtime.transport",
    "TransportError": "runtime.agreement",
}
"""Modules of names that are not in :mod:`commfuse_npu.ops`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'ops')}"), name)
