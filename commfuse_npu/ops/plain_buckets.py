"""Exchanges of buckets over the collectives of torch.distributed: synchronous, in place."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commfuse_npu.ops.buckets import check_bucket, check_fractions
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows

__all__ = ["plain_all_gather_bucket", "plain_reduce_scatter_bucket"]


def plain_reduce_scatter_bucket(
    bucket: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    average: bool = False,
    scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """The plain form of :meth:`~commfuse_npu.ops.buckets.Buckets.reduce_scatter`.

    The average is the sum divided by ``n`` here too, because gloo has no other.  It takes memory
    for a shard, and for the whole bucket in ``reduce_dtype``, in which partials then travel.

    Raises:
        TypeError, ValueError: as there.
    """
    name, size = "plain_reduce_scatter_bucket", group.size()
    check_bucket(name, bucket, size)
    check_fractions(name, bucket, average, scale, reduce_dtype)
    if bucket.numel() == 0:
        return
    with torch.no_grad():
        if scale != 1.0:
            bucket.mul_(scale)
        total = reduce_scatter_rows(bucket.to(reduce_dtype or bucket.dtype), group)
        if average:
            total.div_(size)
        _shard_of(bucket, group).copy_(total)


def plain_all_gather_bucket(bucket: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    """The plain form of :meth:`~commfuse_npu.ops.buckets.Buckets.all_gather`.

    It takes memory for another bucket.

    Raises:
        ValueError: as there.
    """
    check_bucket("plain_all_gather_bucket", bucket, group.size())
    if bucket.numel():
        with torch.no_grad():
            bucket.copy_(all_gather_rows(_shard_of(bucket, group), group))


def _shard_of(bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    elements = bucket.numel() // group.size()
    return bucket[group.rank() * elements : (group.rank() + 1) * elements]
