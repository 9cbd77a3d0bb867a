"""Runs buckets on one rank, fused or by collectives."""

import random
from unittest import mock

import torch
import torch.distributed as dist

from commfuse_npu.ops import Buckets, LinearOptions
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import transport
from tests.random_networks.case import Bucket, BucketRun, Form
from tests.random_networks.values import Found, drawn


def _plain_sum(
    bucket: torch.Tensor, group: dist.ProcessGroup, average: bool, scale: float,
    reduce_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """``Buckets.reduce_scatter`` by torch's collective, in place."""
    bucket.mul_(scale if bucket.dtype.is_floating_point else int(scale))
    total = reduce_scatter_rows(bucket.to(reduce_dtype or bucket.dtype), group)
    _shard(bucket, group).copy_(total.div_(group.size()) if average else total)


def _shard(bucket: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return bucket.unflatten(0, (group.size(), -1))[group.rank()] if len(bucket) else bucket


def _wide(case: BucketRun, bucket: Bucket) -> torch.dtype | None:
    return torch.float32 if case.wide and bucket.dtype != torch.float64 else None


def _filled(case: BucketRun, place: int, rank: int) -> torch.Tensor:
    bucket = case.buckets[place]
    elements = case.size * bucket.elements
    return drawn(case.seed, f"bucket {place} {rank}", (elements,), bucket.dtype, case.rounded)


def run_buckets(case: BucketRun, form: Form, link: Transport | None = None) -> Found:
    """Start all buckets in order; each rank waits for them in its own order, some in between."""
    link = link or transport(case.batched, case.lanes)
    tensors = [_filled(case, place, link.rank) for place in range(len(case.buckets))]
    if form == "fused":
        dice, open_ = random.Random(f"{case.seed} {link.rank}"), {}

        def wait(place: int) -> None:
            handle = open_.pop(place)
            handle.wait()
            if handle.running is not None:
                raise AssertionError(f"bucket {place} is not completed after its wait")

        for place, (bucket, tensor) in enumerate(zip(case.buckets, tensors, strict=True)):
            buckets = Buckets(link, LinearOptions(case.schedule, _wide(case, bucket)))
            if bucket.gather:
                open_[place] = buckets.all_gather(tensor)
            else:
                settings = {"average": bucket.average, "scale": bucket.scale}
                with mock.patch("commfuse_npu.ops.buckets.SCRATCH_BYTES", case.scratch_bytes):
                    open_[place] = buckets.reduce_scatter(tensor, **settings)
            if dice.random() < 0.3:
                wait(dice.choice(list(open_)))
        while open_:
            wait(dice.choice(list(open_)))
    else:
        for bucket, tensor in zip(case.buckets, tensors, strict=True):
            if bucket.gather:
                tensor.copy_(all_gather_rows(_shard(tensor, link.group), link.group))
            else:
                wide = _wide(case, bucket)
                _plain_sum(tensor, link.group, bucket.average, bucket.scale, wide)
    return {f"bucket {place}": tensor for place, tensor in enumerate(tensors)}
