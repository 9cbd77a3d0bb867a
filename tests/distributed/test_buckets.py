"""Buckets: errors, memory and the order of posts.

Their results are compared in :mod:`tests.random_networks`.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, TransportError
from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops import Buckets, LinearOptions
from tests.distributed.programs import new_link, transport, watch_posts
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF

FP32, BF16 = torch.float32, torch.bfloat16
SCRATCH = "commfuse_npu.ops.buckets.SCRATCH_BYTES"


@on_ranks(3)
def test_an_error_while_adding_leaves_the_shard_untouched(rank: int) -> None:
    """An error in an addition between transfers, or in the last one, breaks the transport."""
    kernels = kernels_for(torch.device("cpu"))
    for good in (0, 1):
        link, bucket = new_link(), torch.arange(24.0)
        handle = Buckets(link).reduce_scatter(bucket, average=True)
        calls = [mock.DEFAULT] * good + [MemoryError("while adding")]
        failing = mock.Mock(wraps=kernels.sum_parts, side_effect=calls)
        with mock.patch.object(kernels, "sum_parts", failing), pytest.raises(MemoryError):
            handle.wait()
        words = "reduce_scatter_bucket was interrupted by MemoryErr"
        for call in (handle.wait, lambda: Buckets(link).reduce_scatter(bucket)):  # noqa: B023
            with pytest.raises(TransportError, match=words):
                call()
        assert torch.equal(bucket, torch.arange(24.0))


@pytest.mark.parametrize("reduce_dtype", [None, FP32])
@on_ranks(4)
def test_scratch_memory_stays_within_its_limit(rank: int, reduce_dtype: Any) -> None:
    """Shards of 1000 bf16 elements in four chunks; slots are multiples of 256 elements."""
    link, total = transport(), 1024 * (4 if reduce_dtype else 2)
    slot, chunk_of_all = 256 * 2, 768 * 2
    take, bucket, arenas = link.scratch.take, torch.ones(4000, dtype=BF16), list[Any]()
    for limit, partials in (
        (0, slot),
        (total + 2 * slot - 1, slot),
        (total + 2 * slot, 2 * slot),
        (total + chunk_of_all, chunk_of_all),
        (total + 3 * chunk_of_all + slot, 3 * chunk_of_all),
        (1 << 20, 4 * chunk_of_all),
    ):
        buckets = Buckets(link, LinearOptions(Schedule(chunks=4), reduce_dtype))
        link.scratch.clear()
        taken = lambda *of: arenas.append(take(*of)) or arenas[-1]  # noqa: E731
        with mock.patch.object(link.scratch, "take", taken), mock.patch(SCRATCH, limit):
            for exchange, expected in (
                (buckets.reduce_scatter, total + partials),
                (buckets.all_gather, 0),
            ):
                arenas.clear()
                exchange(bucket).wait()
                assert sum(arena.nbytes for arena in arenas) == expected
        assert not link.scratch.lent


@on_ranks(3)
def test_a_start_needs_nobody_else(rank: int) -> None:
    """One rank starts many exchanges before the others begin any."""
    buckets = Buckets(transport(), LinearOptions(Schedule(chunks=3)))
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
            assert (tensor.view(3, 8)[rank] == 3).all()


@on_ranks(2)
def test_a_bucket_is_posted_after_earlier_ones(rank: int) -> None:
    """The first bucket has memory for one of its three pieces."""
    buckets = Buckets(transport(), LinearOptions(Schedule(lanes=1, chunks=3)))
    posts = list[object]()
    with pytest.MonkeyPatch.context() as patch, mock.patch(SCRATCH, 0):
        watch_posts(patch, lambda *_: posts.append(_))
        first = buckets.reduce_scatter(torch.ones(12))
        begun, all_of_it = len(posts), len([*first.running.program.posts])
        second = buckets.reduce_scatter(torch.ones(12))
        assert begun == len(posts) < all_of_it
        first.wait()
        assert len(posts) > all_of_it
        second.wait()


@on_ranks(2)
def test_a_comparison_comes_after_the_buckets_in_flight(rank: int) -> None:
    """Rank 0 waits for pieces that rank 1 posts only when it finishes the first bucket."""
    link = new_link()
    buckets = Buckets(link, LinearOptions(Schedule(lanes=1, chunks=3)))
    with mock.patch(SCRATCH, 0):
        first = buckets.reduce_scatter(torch.ones(12))
        link.timeout = BRIEF * 10
        if rank == 0:
            first.wait()
        buckets.reduce_scatter(torch.ones(12, dtype=BF16)).wait()
    assert first.running is None
