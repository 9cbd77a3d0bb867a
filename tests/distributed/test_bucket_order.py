"""Buckets that are started together and waited for in any order."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule
from commfuse_npu.ops import Buckets, LinearOptions
from tests.distributed.programs import transport
from tests.distributed.ranks import on_ranks
from tests.distributed.test_buckets import SCRATCH, shard


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_a_start_needs_nobody_else(rank: int, batched: bool) -> None:
    """More exchanges than a digest interval start before the other ranks begin any."""
    buckets = Buckets(transport(batched), LinearOptions(Schedule(chunks=3)))
    exchanges = buckets.reduce_scatter, buckets.all_gather
    with mock.patch(SCRATCH, 0):
        for exchange in exchanges:
            exchange(torch.ones(24)).wait()
    token = torch.zeros(1)
    if rank:
        # The other ranks start only after rank 0 has started everything.
        dist.broadcast(token, 0)
    tensors = [torch.full((24,), float(rank)) for _ in range(300)]
    with mock.patch(SCRATCH, 0):
        handles = [exchanges[number % 2](tensor) for number, tensor in enumerate(tensors)]
    if rank == 0:
        dist.broadcast(token, 0)
    for number, (tensor, handle) in enumerate(zip(tensors, handles, strict=True)):
        handle.wait()
        if number % 2:
            assert tensor.view(3, 8)[:, 0].tolist() == [0, 1, 2]
        else:
            assert (shard(tensor, 3, rank) == 3).all()


@on_ranks(2)
def test_a_batch_is_posted_after_those_of_earlier_buckets(rank: int) -> None:
    """The first bucket has memory for one of its three pieces."""
    buckets = Buckets(transport(True), LinearOptions(Schedule(lanes=1, chunks=3)))
    with mock.patch(SCRATCH, 0):
        first, second = (buckets.reduce_scatter(torch.ones(12)) for _ in range(2))
    assert not first.running.all_posted
    assert second.running._at == 0
    first.wait()
    assert second.running._at > 0
    second.wait()
