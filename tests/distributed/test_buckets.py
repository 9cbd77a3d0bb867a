"""Buckets: rounded sums, and the memory that they take; whole numbers are compared at random."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import new_link, transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.random_networks.bucket_run import plain_sum

FP32, BF16 = torch.float32, torch.bfloat16


def data(rank: int, elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(elements, generator=generator).to(dtype)


def shard(bucket: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    return bucket.view(size, -1)[rank]


def schedules(size: int) -> list[Schedule]:
    found = [Schedule(), Schedule(lanes=1, chunks=3), Schedule(lanes=3, chunks=9)]
    return found + ([Schedule("two_level", 2, 2, node_size=2)] if size % 2 == 0 else [])


def check_sum(
    rank: int, link: Transport, options: BucketOptions, elements: int, dtype: torch.dtype,
    average: bool = False, scale: float = 1.0,
) -> None:  # fmt: skip
    """The own shard, added one partial after the other in the order of the schedule."""
    size, schedule = link.size, options.schedule
    bucket = data(rank, size * elements, dtype)
    plain, scaled = bucket.clone(), bucket * scale if scale != 1.0 else bucket.clone()
    Buckets(link, options).reduce_scatter(bucket, average=average, scale=scale).wait()
    everyone = all_gather_rows(scaled, link.group).view(size, size, -1)[:, rank]
    sources = [*(hop.source for hop in schedule.hops(rank, size, "last")), rank]
    wide = options.reduce_dtype or dtype
    total = everyone[sources[0]].to(wide)
    for source in sources[1:]:
        total = (total + everyone[source]).to(wide)
    shard(scaled, size, rank).copy_((total / size if average else total).to(dtype))
    case = f"{options}, {elements} x {dtype}, average {average}, scale {scale}"
    assert torch.equal(bucket, scaled), case
    if schedule.shape != "two_level" and elements % 2 == 0:
        plain_sum(plain, link.group, average, scale, options.reduce_dtype)
        assert torch.equal(bucket, plain), f"not the collective's bits: {case}"


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_sums_are_rounded_in_the_order_of_the_collective(rank: int, batched: bool) -> None:
    """A shard of 7 elements does not divide into 3 chunks, and has no 9."""
    link = transport(batched)
    for schedule in schedules(link.size):
        for elements in (1, 7, 64):
            for dtype in (FP32, BF16):
                for average, scale, scratch in ((False, 1.0, 1 << 20), (True, 0.3, 0)):
                    options = BucketOptions(schedule, scratch_bytes=scratch)
                    check_sum(rank, link, options, elements, dtype, average, scale)
            wide = BucketOptions(schedule, reduce_dtype=FP32, scratch_bytes=300)
            check_sum(rank, link, wide, elements, BF16, True, 0.3)
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


@on_ranks(3)
def test_an_error_while_adding_leaves_the_shard_untouched(rank: int) -> None:
    """An error between transfers, or at the end of the sum, breaks the transport as well."""
    kernels = kernels_for(torch.device("cpu"))
    for good in (0, 1):
        link, calls = new_link(), iter([kernels.sum_parts] * good)
        bucket = data(rank, link.size * 8, FP32)
        before = bucket.clone()
        handle = Buckets(link).reduce_scatter(bucket, average=True)

        def fail(*args: Any, calls: Iterator[Callable[..., None]] = calls, **named: Any) -> None:
            call = next(calls, None)
            if call is None:
                raise MemoryError("while adding")
            call(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "sum_parts", fail)
            with pytest.raises(MemoryError):
                handle.wait()
        words = "reduce_scatter_bucket was interrupted by MemoryErr"
        with pytest.raises(TransportError, match=words):
            handle.wait()
        with pytest.raises(TransportError, match=words):
            Buckets(link).reduce_scatter(bucket)
        assert torch.equal(bucket, before)


def memory(rank: int, options: BucketOptions, batched: bool) -> tuple[int, int]:
    """The most bytes of scratch lent at a time, by a sum and by a gather."""
    link = transport(batched)
    link.scratch.clear()
    lent, peaks = 0, []
    take, give_back = link.scratch.take, link.scratch.give_back

    def taken(*args: Any) -> Any:
        nonlocal lent
        arena = take(*args)
        lent += arena.nbytes
        peaks[-1] = max(peaks[-1], lent)
        return arena

    def given(arena: Any) -> None:
        nonlocal lent
        lent -= arena.nbytes
        give_back(arena)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link.scratch, "take", taken)
        patch.setattr(link.scratch, "give_back", given)
        for exchange in ("reduce_scatter", "all_gather"):
            peaks.append(0)
            bucket = torch.ones(link.size * 1000, dtype=BF16)
            getattr(Buckets(link, options), exchange)(bucket).wait()
            assert lent == 0
    return peaks[0], peaks[1]


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("reduce_dtype", [None, FP32])
def test_scratch_memory_stays_within_its_limit(ranks, reduce_dtype, batched: bool) -> None:
    """Four ranks, shards of 1000 x bf16 in four chunks, in slots of whole 256 elements."""
    total = 1024 * (4 if reduce_dtype else 2)
    one, chunk_of_all = 256 * 2, 768 * 2
    for limit, partials in (
        (0, one),
        (total + 2 * one - 1, one),
        (total + 2 * one, 2 * one),
        (total + chunk_of_all, chunk_of_all),
        (total + 3 * chunk_of_all + one, 3 * chunk_of_all),
        (1 << 20, 4 * chunk_of_all),
    ):
        options = BucketOptions(Schedule(chunks=4), reduce_dtype, limit)
        assert ranks(4).run(memory, options, batched) == [(total + partials, 0)] * 4


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_one_rank_or_no_element_transfers_nothing(rank: int) -> None:
    link = new_link()
    bucket = torch.ones(5 if link.size == 1 else 0, dtype=BF16)
    buckets = Buckets(link, BucketOptions(scratch_bytes=0, reduce_dtype=FP32))
    handle = buckets.reduce_scatter(bucket, average=True, scale=0.5)
    assert handle.is_completed()
    handle.wait()
    handle = buckets.all_gather(bucket)
    handle.wait_rows(0, len(bucket))
    handle.wait()
    assert (bucket == 0.5).all()
    assert (link.operations, link.scratch.idle_bytes, link.scratch.lent) == (0, 0, 0)


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(2)
def test_threads_take_turns_with_buckets_under_way(rank: int, batched: bool) -> None:
    """Buckets are started by hooks of the backward, which has a thread of its own on a device."""
    buckets = Buckets(
        new_link(batched), BucketOptions(Schedule(lanes=1, chunks=2), scratch_bytes=0)
    )
    one, other, third = (torch.ones(16) for _ in range(3))
    with ThreadPoolExecutor(1) as hooks:
        hooks.submit(buckets.reduce_scatter, one).result()
        last = buckets.reduce_scatter(other)
        hooks.submit(last.wait).result()
        assert last.is_completed()
        buckets.reduce_scatter(third).wait()
    assert all((shard(bucket, 2, rank) == 2).all() for bucket in (one, other, third))


@on_ranks(2)
def test_each_bucket_is_bound_once(rank: int) -> None:
    buckets = Buckets(new_link())
    tensors = [torch.ones(8) for _ in range(20)]
    bound: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, Running, "_bind", lambda running, tensors: bound.extend(tensors))
        handles = [buckets.reduce_scatter(tensor) for tensor in tensors]
        handles[-1].wait()
    assert bound == ["bucket"] * len(tensors)
