"""Buckets that are started together and waited for in any order, or row by row."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.distributed.test_buckets import shard


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_a_start_needs_nobody_else(rank: int, batched: bool) -> None:
    """More exchanges than a digest interval start before the other ranks begin any."""
    buckets = Buckets(transport(batched), BucketOptions(Schedule(chunks=3), scratch_bytes=0))
    exchanges = buckets.reduce_scatter, buckets.all_gather
    for exchange in exchanges:
        exchange(torch.ones(24)).wait()
    token = torch.zeros(1)
    if rank:
        # The other ranks start only after rank 0 has started everything.
        dist.broadcast(token, 0)
    tensors = [torch.full((24,), float(rank)) for _ in range(300)]
    handles = [exchanges[number % 2](tensor) for number, tensor in enumerate(tensors)]
    if rank == 0:
        dist.broadcast(token, 0)
    for number, (tensor, handle) in enumerate(zip(tensors, handles, strict=True)):
        handle.wait()
        if number % 2:
            assert tensor.view(3, 8)[:, 0].tolist() == [0, 1, 2]
        else:
            assert (shard(tensor, 3, rank) == 3).all()


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("last_first", [False, True])
@on_ranks(3)
def test_rows_are_waited_for_one_by_one(rank: int, batched: bool, last_first: bool) -> None:
    """Three ranks; shards of 8 elements in four chunks of 2."""
    link, waited = transport(batched), []
    options = BucketOptions(Schedule(lanes=2, chunks=4), last_first=last_first)
    bucket = torch.full((24,), -1.0)
    shard(bucket, 3, rank).copy_(torch.arange(8.0) + 8 * rank)
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, Running, "_wait", lambda _, *steps: waited.extend(chain(*steps[:2])))
        handle = Buckets(link, options).all_gather(bucket)
        handle.wait_rows(8 * rank, 8 * rank + 8)
        handle.wait_rows(3, 3)
        assert not waited, "waits for its own shard"
        other = (rank + 1) % 3
        handle.wait_rows(8 * other + 5, 8 * other + 7)
        assert torch.equal(bucket[8 * other + 4 : 8 * other + 8], torch.arange(4.0) + 8 * other + 4)
        # The shard of rank r+1 is sent over distance 2: the second transfer of each chunk.
        assert waited == ([1, 3] if last_first else [5, 7])
        assert not handle.is_completed()
    handle.wait()
    assert torch.equal(bucket, torch.arange(24.0))
    handle.wait_rows(0, 24)
    with pytest.raises(ValueError, match=r"elements 5:25 are not within the bucket; .* 0:24"):
        handle.wait_rows(5, 25)


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_rows_wait_for_what_is_in_front(rank: int, batched: bool) -> None:
    """An earlier exchange is finished first; else a rank that waits for it would deadlock."""
    link = transport(batched)
    options = BucketOptions(Schedule(lanes=1, chunks=3), scratch_bytes=0)
    buckets = Buckets(link, options)
    for _ in range(2):
        sums, values = torch.ones(link.size * 6), torch.full((link.size * 6,), float(rank))
        first, second = buckets.reduce_scatter(sums), buckets.all_gather(values)
        if rank:
            first.wait()
        other = (rank + 1) % link.size
        second.wait_rows(other * 6, other * 6 + 1)
        assert first.is_completed()
        assert values[other * 6] == other
        with pytest.raises(ValueError, match=r"call wait\(\) instead of wait_rows\(\)"):
            first.wait_rows(0, 1)
        second.wait()
