"""Runs buckets on one rank, fused or by collectives."""

import random
from unittest import mock

import torch
import torch.distributed as dist

from commfuse_npu.ops import Buckets, LinearOptions
from commfuse_npu.ops.buckets import BucketExchange
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import transport
from tests.random_networks.case import Bucket, BucketRun, Form
from tests.random_networks.values import Found, drawn


def run_buckets(case: BucketRun, form: Form, link: Transport | None = None) -> Found:
    """Start all buckets in order; each rank waits for them in its own order, some in between."""
    link = link or transport(case.lanes)
    dice, open_ = random.Random(f"{case.seed} {link.rank}"), dict[int, BucketExchange]()
    results: Found = {}

    def wait(place: int) -> None:
        handle = open_.pop(place)
        handle.wait()
        if handle.running is not None:
            raise AssertionError(f"bucket {place} is not completed after its wait")

    for place, bucket in enumerate(case.buckets):
        what, elements = f"bucket {place} {link.rank}", case.size * bucket.elements
        tensor = drawn(case.seed, what, (elements,), bucket.dtype, case.rounded)
        results[f"bucket {place}"] = tensor
        wide = torch.float32 if case.wide and bucket.dtype != torch.float64 else None
        if form != "fused":
            _plain(bucket, tensor, link.group, wide)
            continue
        buckets = Buckets(link, LinearOptions(case.schedule, wide))
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
    return results


def _plain(
    bucket: Bucket, tensor: torch.Tensor, group: dist.ProcessGroup, wide: torch.dtype | None
) -> None:
    """The same by torch's collective, in place."""
    size = group.size()
    shard = tensor.unflatten(0, (size, -1))[group.rank()] if len(tensor) else tensor
    if bucket.gather:
        tensor.copy_(all_gather_rows(shard, group))
        return
    tensor.mul_(bucket.scale if tensor.dtype.is_floating_point else int(bucket.scale))
    total = reduce_scatter_rows(tensor.to(wide or tensor.dtype), group)
    shard.copy_(total.div_(size) if bucket.average else total)
