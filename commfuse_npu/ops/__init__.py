"""Differentiable operators built on the pipelines, each next to its plain (collective) form."""

from __future__ import annotations

from commfuse_npu.ops.attention import (
    attention_linear_reduce_scatter,
    plain_attention_linear_reduce_scatter,
)
from commfuse_npu.ops.linear import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    plain_all_gather_linear,
    plain_linear_all_reduce,
    plain_linear_reduce_scatter,
)
from commfuse_npu.ops.options import LinearOptions

__all__ = [
    "LinearOptions",
    "all_gather_linear",
    "attention_linear_reduce_scatter",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "plain_all_gather_linear",
    "plain_attention_linear_reduce_scatter",
    "plain_linear_all_reduce",
    "plain_linear_reduce_scatter",
]
