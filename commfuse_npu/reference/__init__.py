"""The ops over the collectives of torch.distributed: their plain forms, reference and fallback.

Each takes the arguments of its op, ``group`` in place of the transport.  With ``same_gemms``, or
``same_blocks``, it cuts its GEMMs and its queries into the pieces of the fused op's program.
"""

from __future__ import annotations

from commfuse_npu.reference.attention import plain_attention_linear_reduce_scatter
from commfuse_npu.reference.buckets import plain_all_gather_bucket, plain_reduce_scatter_bucket
from commfuse_npu.reference.heads import (
    plain_all_to_all_linear,
    plain_attention_all_to_all,
    plain_attention_all_to_all_linear,
    plain_linear_all_to_all,
)
from commfuse_npu.reference.linear import (
    plain_all_gather_linear,
    plain_linear_all_reduce,
    plain_linear_reduce_scatter,
)
from commfuse_npu.reference.sharded_linear import plain_sharded_linear

__all__ = [
    "plain_all_gather_bucket",
    "plain_all_gather_linear",
    "plain_all_to_all_linear",
    "plain_attention_all_to_all",
    "plain_attention_all_to_all_linear",
    "plain_attention_linear_reduce_scatter",
    "plain_linear_all_reduce",
    "plain_linear_all_to_all",
    "plain_linear_reduce_scatter",
    "plain_reduce_scatter_bucket",
    "plain_sharded_linear",
]
