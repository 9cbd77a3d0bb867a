"""Buckets against the plain collectives, and the memory that they take."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.ops.buckets import plain_all_gather_bucket, plain_reduce_scatter_bucket
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import new_link, transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT

FP32, BF16 = torch.float32, torch.bfloat16


def data(rank: int, elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(elements, generator=generator).to(dtype)


def shard(bucket: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    return bucket.view(size, -1)[rank]


def summed(
    bucket: torch.Tensor,
    group: dist.ProcessGroup,
    sources: list[int],
    dtype: torch.dtype,
    average: bool,
) -> torch.Tensor:
    """The own shard, added one partial after the other in the order of ``sources``."""
    size, rank = group.size(), group.rank()
    everyone = all_gather_rows(bucket, group).view(size, size, -1)[:, rank]
    total = everyone[sources[0]].to(dtype)
    for source in sources[1:]:
        total = (total + everyone[source]).to(dtype)
    return (total / size if average else total).to(bucket.dtype)


def sources_of(schedule: Schedule, rank: int, size: int) -> list[int]:
    return [*(hop.source for hop in schedule.hops(rank, size, "last")), rank]


def schedules(size: int) -> list[Schedule]:
    found = [
        Schedule(),
        Schedule(lanes=1, chunks=3),
        Schedule(lanes=3, chunks=5),
        Schedule(lanes=2, chunks=9),
    ]
    return found + ([Schedule("two_level", 2, 2, node_size=2)] if size % 2 == 0 else [])


def check_sum(
    rank: int,
    link: Transport,
    options: BucketOptions,
    elements: int,
    dtype: torch.dtype,
    average: bool = False,
    scale: float = 1.0,
) -> None:
    size = link.size
    bucket = data(rank, size * elements, dtype)
    scaled = bucket * scale if scale != 1.0 else bucket.clone()
    plain = bucket.clone()
    handle = Buckets(link, options).reduce_scatter(bucket, average=average, scale=scale)
    assert size == 1 or not handle.is_completed()
    handle.wait()
    assert handle.is_completed()
    handle.wait()
    sources = sources_of(options.schedule, rank, size)
    expected = scaled.clone()
    wide = options.reduce_dtype or dtype
    shard(expected, size, rank).copy_(summed(scaled, link.group, sources, wide, average))
    case = f"{options}, {elements} x {dtype}, average {average}, scale {scale}"
    assert torch.equal(bucket, expected), case
    if options.schedule.shape != "two_level" and elements % 2 == 0:
        plain_reduce_scatter_bucket(
            plain,
            group=link.group,
            average=average,
            scale=scale,
            reduce_dtype=options.reduce_dtype,
        )
        assert torch.equal(bucket, plain), f"not the collective's bits: {case}"


def check_gather(
    rank: int, link: Transport, options: BucketOptions, elements: int, dtype: torch.dtype
) -> None:
    size = link.size
    # NaN where the other ranks' shards have to arrive.
    bucket = torch.full((size * elements,), float("nan")).to(dtype)
    shard(bucket, size, rank).copy_(data(rank, elements, dtype))
    plain = bucket.clone()
    Buckets(link, options).all_gather(bucket).wait()
    expected = torch.cat([data(other, elements, dtype) for other in range(size)])
    assert torch.equal(bucket, expected), (options, elements, dtype)
    plain_all_gather_bucket(plain, group=link.group)
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_equals_the_collective(rank: int, batched: bool) -> None:
    """A shard of 7 elements does not divide into 3 or 5 chunks, and has no 9."""
    link = transport(batched)
    for schedule in schedules(link.size):
        for dtype in (FP32, BF16):
            for elements in (1, 7, 64):
                for last_first in (False, True):
                    options = BucketOptions(schedule, last_first=last_first)
                    check_gather(rank, link, options, elements, dtype)
                for average, scale, scratch in ((False, 1.0, 1 << 20), (True, 0.3, 0)):
                    options = BucketOptions(schedule, scratch_bytes=scratch)
                    check_sum(rank, link, options, elements, dtype, average, scale)
            wide = BucketOptions(schedule, reduce_dtype=FP32, scratch_bytes=300)
            check_sum(rank, link, wide, 64, dtype, True, 0.3)
            check_sum(rank, link, wide, 7, dtype)
    check_gather(rank, link, BucketOptions(), 8, torch.int64)
    check_sum(rank, link, BucketOptions(), 8, torch.int64)
    assert not link._in_flight


@on_ranks(3)
def test_only_the_own_shard_is_written_and_only_at_the_end(rank: int) -> None:
    link = transport(False)
    bucket = data(rank, link.size * 1000, BF16)
    before = bucket.clone()
    handle = Buckets(link).reduce_scatter(bucket)
    dist.barrier()
    time.sleep(0.05)
    assert torch.equal(bucket, before), "written before the wait"
    handle.wait()
    for other in range(link.size):
        same = torch.equal(shard(bucket, link.size, other), shard(before, link.size, other))
        assert same is (other != rank)


def memory(rank: int, options: BucketOptions, batched: bool) -> tuple[int, int]:
    """The most bytes of scratch lent at a time, and those lent at the end."""
    link = transport(batched)
    lent = peak = 0
    link.scratch.clear()
    take, give_back = link.scratch.take, link.scratch.give_back
    with pytest.MonkeyPatch.context() as patch:

        def taken(*args):
            nonlocal lent, peak
            arena = take(*args)
            lent += arena.nbytes
            peak = max(peak, lent)
            return arena

        def given(arena):
            nonlocal lent
            lent -= arena.nbytes
            give_back(arena)

        patch.setattr(link.scratch, "take", taken)
        patch.setattr(link.scratch, "give_back", given)
        bucket = torch.ones(link.size * 1000, dtype=BF16)
        Buckets(link, options).reduce_scatter(bucket).wait()
        assert torch.equal(shard(bucket, link.size, rank), torch.full((1000,), 4, dtype=BF16))
        assert lent == 0
        before = peak
        Buckets(link, options).all_gather(bucket).wait()
        assert peak == before, "a gather took scratch memory"
    return peak, lent


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_scratch_memory_stays_within_its_limit(ranks, reduce_dtype, batched: bool) -> None:
    """Four ranks, shards of 1000 x bf16 in four chunks, in slots of whole 256 elements."""
    total = 1024 * (4 if reduce_dtype else 2)
    one, chunk_of_all = 256 * 2, 768 * 2
    for limit, partials in (
        (0, one),
        (total, one),
        (total + 2 * one - 1, one),
        (total + 2 * one, 2 * one),
        (total + chunk_of_all, chunk_of_all),
        (total + 3 * chunk_of_all + one, 3 * chunk_of_all),
        (1 << 20, 4 * chunk_of_all),
    ):
        options = BucketOptions(Schedule(chunks=4), reduce_dtype, limit)
        assert ranks(4).run(memory, options, batched) == [(total + partials, 0)] * 4


@on_ranks(1)
def test_a_group_of_one_transfers_nothing(rank: int) -> None:
    link_ = new_link()
    buckets = Buckets(link_, BucketOptions(scratch_bytes=0, reduce_dtype=FP32))
    bucket = torch.ones(5, dtype=BF16)
    handle = buckets.reduce_scatter(bucket, average=True, scale=0.5)
    assert handle.is_completed()
    handle.wait()
    assert torch.equal(bucket, torch.full((5,), 0.5, dtype=BF16))
    handle = buckets.all_gather(bucket)
    handle.wait_rows(0, 5)
    handle.wait()
    assert torch.equal(bucket, torch.full((5,), 0.5, dtype=BF16))
    assert link_.operations == 0
    assert (link_.scratch.idle_bytes, link_.scratch.lent) == (0, 0)


@on_ranks(2)
def test_an_empty_bucket_transfers_nothing(rank: int) -> None:
    link = transport(False)
    bucket, operations = torch.ones(0), link.operations
    Buckets(link).reduce_scatter(bucket, average=True, scale=0.5).wait()
    Buckets(link).all_gather(bucket).wait()
    plain_reduce_scatter_bucket(bucket, group=link.group)
    plain_all_gather_bucket(bucket, group=link.group)
    assert link.operations == operations


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(2)
def test_threads_take_turns_with_buckets_under_way(rank: int, batched: bool) -> None:
    """Buckets are started by hooks of the backward, which has a thread of its own on a device."""
    buckets = Buckets(
        new_link(batched), BucketOptions(Schedule(lanes=1, chunks=2), scratch_bytes=0)
    )
    one, other, third = (torch.ones(8 * buckets._transport.size) for _ in range(3))
    with ThreadPoolExecutor(1) as hooks:
        hooks.submit(buckets.reduce_scatter, one).result()
        last = buckets.reduce_scatter(other)
        hooks.submit(last.wait).result()
        assert last.is_completed()
        buckets.reduce_scatter(third).wait()
    for bucket in (one, other, third):
        assert (shard(bucket, buckets._transport.size, rank) == buckets._transport.size).all()


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(2)
def test_each_bucket_is_bound_once(rank: int, batched: bool) -> None:
    buckets = Buckets(new_link(batched))
    tensors = [torch.ones(8) for _ in range(20)]
    buckets.reduce_scatter(tensors[0]).wait()
    with pytest.MonkeyPatch.context() as patch:
        bound: list[str] = []
        watch_calls(patch, Running, "_bind", lambda running, tensors: bound.extend(tensors))
        handles = [buckets.reduce_scatter(tensor) for tensor in tensors]
        handles[-1].wait()
    assert bound == ["bucket"] * len(tensors)


@on_ranks(3)
def test_buckets_take_the_lanes_that_there_are(rank: int) -> None:
    """A schedule that names no number of lanes takes those that there are, as in every op."""
    few = Transport.create(lanes=1, timeout=PATIENT)
    bucket = torch.ones(12)
    Buckets(few).reduce_scatter(bucket).wait()
    assert (shard(bucket, 3, rank) == 3).all()
