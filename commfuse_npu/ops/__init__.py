"""Differentiable operators that overlap their collectives with computation.

On a :class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport` each one is unfused.

Before anything is sent, each raises a TypeError or ValueError if dtypes, devices or shapes do not
fit each other or the group, and a MismatchError if another rank calls another op, or with another
shape.  A TransportError says that a transfer failed.
"""

from __future__ import annotations

from commfuse_npu.ops.attention import attention_linear_reduce_scatter
from commfuse_npu.ops.attention_runs import Documents
from commfuse_npu.ops.buckets import BucketExchange, Buckets
from commfuse_npu.ops.linear import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from commfuse_npu.ops.linear_options import LinearOptions
from commfuse_npu.ops.ulysses import (
    all_to_all_linear,
    attention_all_to_all,
    linear_all_to_all,
)
from commfuse_npu.removed import missing_name

__all__ = [
    "BucketExchange",
    "Buckets",
    "Documents",
    "LinearOptions",
    "all_gather_linear",
    "all_to_all_linear",
    "attention_all_to_all",
    "attention_linear_reduce_scatter",
    "linear_all_reduce",
    "linear_all_to_all",
    "linear_reduce_scatter",
]


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name)
