"""Buckets against the plain collectives, in any order of waits, and when things go wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import MismatchError, Schedule, Transport, TransportError
from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.ops.buckets import plain_all_gather_bucket, plain_reduce_scatter_bucket
from commfuse_npu.plan.program import Post
from commfuse_npu.runtime import agreement
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import view, watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT

FP32, BF16 = torch.float32, torch.bfloat16


def new_link(batched: bool = False, **options: Any) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched, **options)


@lru_cache
def transport(batched: bool) -> Transport:
    """One per process and way of posting; made by all ranks at the same time."""
    return new_link(batched)


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


SIZES = (24, 7, 24, 40, 2)


def start_all(
    rank: int, link: Transport, options: BucketOptions, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Any]]:
    """Start gradients and parameters in turns; ``(bucket, what it has to become, handle)``.

    Two users of one transport, with options of their own.
    """
    size = link.size
    gradients = Buckets(link, options)
    parameters = Buckets(link, replace(options, last_first=True, scratch_bytes=1 << 20))
    for number, elements in enumerate(SIZES):
        parts = [data(other, size * elements, BF16, seed + number) for other in range(size)]
        if number % 2:
            expected = torch.cat([shard(parts[other], size, other) for other in range(size)])
            bucket = parts[rank].clone()
            yield bucket, expected, parameters.all_gather(bucket)
            continue
        expected = parts[rank].clone()
        own = [shard(part, size, rank) for part in parts]
        total = own[(rank - 1) % size].clone()
        for distance in range(2, size + 1):
            total += own[(rank - distance) % size]
        shard(expected, size, rank).copy_(total)
        bucket = parts[rank].clone()
        yield bucket, expected, gradients.reduce_scatter(bucket)


@pytest.mark.parametrize(
    ("scratch_bytes", "check"), [(0, "first"), (100, "always"), (1 << 20, "first")]
)
@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_ranks_may_wait_in_different_orders(
    rank: int, batched: bool, scratch_bytes: int, check: str
) -> None:
    """What is new is compared; a rank in a wait needs those that compare, with a new transport."""
    link = new_link(batched, check=check)
    options = BucketOptions(Schedule(lanes=2, chunks=3), scratch_bytes=scratch_bytes)
    shuffled = torch.Generator().manual_seed(rank)
    # Starts and waits mixed: rank 0 waits at once, rank 1 after two starts, and so on.
    for attempt in range(4):
        open_: list[Any] = []
        for bucket, expected, handle in start_all(rank, link, options, 100 + 10 * attempt):
            open_.append((bucket, expected, handle))
            if len(open_) > (rank + attempt) % 4:
                open_.pop()[2].wait()
                assert torch.equal(bucket, expected)
        for bucket, expected, handle in reversed(open_):
            handle.wait()
            assert torch.equal(bucket, expected)
    for attempt in range(4):
        started = list(start_all(rank, link, options, 10 * attempt))
        for place in torch.randperm(len(started), generator=shuffled).tolist():
            started[place][2].wait()
            # What was started earlier is finished with it.
            for bucket, expected, handle in started[: place + 1]:
                assert handle.is_completed()
                assert torch.equal(bucket, expected)
    assert not link._in_flight


def posts_in_batches(rank: int) -> list[tuple[int, int, int]]:
    """(lane, number of the bucket, step) of each batch, with waits that depend on the rank."""
    link = transport(True)
    options = BucketOptions(Schedule(lanes=2, chunks=3), scratch_bytes=0)
    for _, _, handle in start_all(rank, link, options, 0):
        handle.wait()
    posts: list[tuple[int, int, int]] = []
    numbers: dict[Running, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        begin = Transport.begin

        def numbered(self, *args):
            running = begin(self, *args)
            numbers[running] = len(numbers)
            return running

        def logged(self, one):
            sent = one.send.transfer
            posts.append((sent.lane, numbers[self], sent.step))

        patch.setattr(Transport, "begin", numbered)
        watch_posts(patch, logged)
        started = []
        for place, (_, _, handle) in enumerate(start_all(rank, link, options, 0)):
            started.append(handle)
            if place % (rank + 1) == rank:
                handle.wait()
        started[-1].wait()
    return posts


def test_batches_are_posted_in_one_order(ranks) -> None:
    """On HCCL they match by it; gloo would take some wrong orders without complaint."""
    posts = ranks(3).run(posts_in_batches)
    order = [(number, step) for _, number, step in posts[0]]
    assert order == sorted(order)
    assert len(order) == sum(2 * min(3, elements) for elements in SIZES)
    for other in posts[1:]:
        assert other == posts[0]


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_a_start_needs_nobody_else(rank: int, batched: bool) -> None:
    link = transport(batched)
    options = BucketOptions(Schedule(chunks=3), scratch_bytes=0)
    for _, _, handle in start_all(rank, link, options, 0):
        handle.wait()
    token = torch.zeros(1)
    if rank:
        # The others come only after rank 0 has started everything.
        dist.broadcast(token, 0)
    # So many that digests of what was begun are compared meanwhile.
    started = [one for seed in range(30) for one in start_all(rank, link, options, seed)]
    assert len(started) > 128
    if rank == 0:
        dist.broadcast(token, 0)
    for bucket, expected, handle in started:
        handle.wait()
        assert torch.equal(bucket, expected)


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


# ------------------------------------------------------------------- order of a gather


@contextmanager
def logged_receives(link: Transport) -> Iterator[tuple[list[int], list[int]]]:
    """First elements of the receives of a gather, as they are posted; steps waited for."""
    offsets: list[int] = []
    waited: list[int] = []
    with pytest.MonkeyPatch.context() as patch:

        def posted(self, one: Post) -> None:
            if one.receive is not None:
                offsets.append(view(self, one.receive.span).storage_offset())

        watch_posts(patch, posted)
        watch_calls(patch, Running, "_wait", lambda _, *steps: waited.extend(chain(*steps[:2])))
        yield offsets, waited


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("last_first", [False, True])
@on_ranks(3)
def test_rows_are_waited_for_one_by_one(rank: int, batched: bool, last_first: bool) -> None:
    """Three ranks, shards of 8 in four chunks of 2."""
    link = transport(batched)
    options = BucketOptions(Schedule(lanes=2, chunks=4), last_first=last_first)
    bucket = torch.full((24,), -1.0)
    shard(bucket, 3, rank).copy_(torch.arange(8.0) + 8 * rank)
    with logged_receives(link) as (offsets, waited):
        handle = Buckets(link, options).all_gather(bucket)
        handle.wait_rows(8 * rank, 8 * rank + 8)
        handle.wait_rows(3, 3)
        assert not waited, "waits for its own shard"
        other = (rank + 1) % 3
        handle.wait_rows(8 * other + 5, 8 * other + 7)
        assert torch.equal(bucket[8 * other + 4 : 8 * other + 8], torch.arange(4.0) + 8 * other + 4)
        early = list(waited)
        assert not handle.is_completed()
    handle.wait()
    assert torch.equal(bucket, torch.arange(24.0))
    handle.wait_rows(0, 24)
    with pytest.raises(ValueError, match=r"elements 5:25 are not within the bucket; .* 0:24"):
        handle.wait_rows(5, 25)
    chunks = (3, 2, 1, 0) if last_first else (0, 1, 2, 3)
    expected = [8 * ((rank - k) % 3) + 2 * chunk for chunk in chunks for k in (1, 2)]
    assert offsets == expected
    # The shard of rank r+1 comes from distance 2: the second transfer of each chunk.
    assert early == ([1, 3] if last_first else [5, 7])


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_rows_wait_for_what_is_in_front(rank: int, batched: bool) -> None:
    """What is in front is finished first, or a rank that waits for it would wait for ever."""
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


# ------------------------------------------------------------------- memory


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


# ------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("size", "rows: [0-9]+ here, [0-9]+ there"),
        ("dtype", "dtype: torch.[a-z0-9]+ here, torch.[a-z0-9]+ there"),
        ("average", "options: .*(True|False).* here, .*(True|False).* there"),
        ("reduce_dtype", "sum_dtype: torch.[a-z0-9]+ here, torch.[a-z0-9]+ there"),
        ("scratch", r"options: .*10.\) here, .*10.\) there"),
        ("direction", "options: (True|False) here, (True|False) there"),
        ("operation", "operation: [a-z_]+_bucket here, [a-z_]+_bucket there"),
        ("empty", "path: [a-z_]+ here, [a-z_]+ there"),
    ],
)
@on_ranks(2)
def test_ranks_that_disagree_are_told_what_about(rank: int, what: str, words: str) -> None:
    given, more, options = torch.ones(4), {}, BucketOptions()
    gather = what in ("dtype", "direction") or (what == "operation" and rank == 1)
    if what == "size":
        given = torch.ones(2 * (3 + rank))
    elif what == "empty":
        given = torch.ones(4 * rank)
    elif what == "average":
        more = {"average": rank == 1}
    elif what == "dtype":
        given = torch.ones(4, dtype=BF16 if rank else FP32)
    elif what == "reduce_dtype":
        given, options = given.to(BF16), BucketOptions(reduce_dtype=FP32 if rank else None)
    elif what == "scratch":
        options = BucketOptions(scratch_bytes=100 + rank)
    elif what == "direction":
        options = BucketOptions(last_first=rank == 1)
    buckets = Buckets(new_link(), options)
    with pytest.raises(MismatchError, match=words):
        (buckets.all_gather if gather else buckets.reduce_scatter)(given, **more)


def dies_midway(rank: int) -> list[str]:
    """The last rank ends after its start, when some of its partials have not been sent."""
    link_ = new_link()
    options = BucketOptions(Schedule(lanes=2, chunks=4), scratch_bytes=0)
    buckets = Buckets(link_, options)
    buckets.reduce_scatter(data(rank, 3 * 400, FP32)).wait()
    one, two = data(rank, 3 * 400, FP32, 1), data(rank, 3 * 400, FP32, 2)
    before = one.clone(), two.clone()
    first, second = buckets.reduce_scatter(one), buckets.reduce_scatter(two)
    dist.barrier()
    if rank == 2:
        os._exit(7)
    messages = []
    # Again and for the other bucket: nothing is taken for finished that is not.
    for handle in (first, first, second):
        with pytest.raises(TransportError) as caught:
            handle.wait()
        messages.append(str(caught.value))
        assert not handle.is_completed()
    with pytest.raises(TransportError):
        buckets.all_gather(torch.ones(3))
    assert torch.equal(one, before[0])
    assert torch.equal(two, before[1])
    return messages


def test_a_rank_that_dies_leaves_the_shards_untouched(ranks) -> None:
    group = ranks(3)
    group.kill()
    outcomes = group.outcomes(dies_midway, may_die=True)
    assert isinstance(outcomes[2].error, EOFError)
    for rank, outcome in enumerate(outcomes[:2]):
        assert outcome.error is None, outcome.trace
        assert len(set(outcome.value)) == 1
        assert "peer 2" in outcome.value[0]
        for part in (f"rank {rank} of 3", "reduce_scatter_bucket", "step ", "lane "):
            assert part in outcome.value[0]


@on_ranks(3)
def test_an_error_while_adding_leaves_the_shard_untouched(rank: int) -> None:
    """An error between transfers, or at the end of the sum, breaks the transport as well."""
    kernels = kernels_for(torch.device(new_link().device_type))
    add = kernels.sum_parts
    for good in (0, 1):
        link_ = new_link()
        bucket = data(rank, link_.size * 8, FP32)
        before = bucket.clone()
        handle = Buckets(link_).reduce_scatter(bucket, average=True)
        calls = iter([add] * good)

        def fail(*args: Any, calls: Iterator[Callable[..., None]] = calls, **named: Any) -> None:
            call = next(calls, None)
            if call is None:
                raise MemoryError("while adding")
            call(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "sum_parts", fail)
            with pytest.raises(MemoryError):
                handle.wait()
        assert torch.equal(bucket, before)
        words = "reduce_scatter_bucket was interrupted by MemoryErr"
        with pytest.raises(TransportError, match=words):
            handle.wait()
        with pytest.raises(TransportError, match=words):
            Buckets(link_).reduce_scatter(bucket)
        assert torch.equal(bucket, before)


@on_ranks(2)
def test_arguments_that_cannot_work_are_refused(rank: int) -> None:
    """Refused before anything is sent, on every rank: the transport goes on working."""
    link = transport(False)
    buckets, group = Buckets(link), link.group
    wide = Buckets(link, BucketOptions(reduce_dtype=FP32))
    four, whole = torch.ones(4), torch.ones(4, dtype=torch.int32)
    five, pad = torch.ones(5), "5 elements are not divisible by the group size 2; pad the bucket to"
    lanes, nodes = Schedule(lanes=9), Schedule("two_level", node_size=3)
    plain_sum, number = plain_reduce_scatter_bucket, torch.int64
    cases: list[tuple[str, Callable[[], object]]] = [
        (r"shape \(2, 2\) .* pass the flat buffer", lambda: buckets.all_gather(torch.ones(2, 2))),
        (r"strides \(2,\)", lambda: buckets.reduce_scatter(torch.ones(8)[::2])),
        (f"{pad} 6", lambda: buckets.reduce_scatter(five)),
        (f"{pad} 6", lambda: plain_all_gather_bucket(five, group=group)),
        ("is on meta, this group transfers cpu", lambda: buckets.all_gather(four.to("meta"))),
        (
            "torch.int32, which cannot hold the result of an average; use a floating",
            lambda: buckets.reduce_scatter(whole, average=True),
        ),
        ("the result of scale 0.5; use a", lambda: plain_sum(whole, group=group, scale=0.5)),
        ("result of reduce_dtype torch.float32; use a", lambda: wide.reduce_scatter(whole)),
        ("it has to be floating", lambda: plain_sum(four, group=group, reduce_dtype=number)),
        ("need a floating-point dtype", lambda: BucketOptions(reduce_dtype=number)),
        ("is -1; it must be a whole number from 0", lambda: BucketOptions(scratch_bytes=-1)),
        (
            "uses 9 lanes, the transport has 3; create it with lanes=9 or plan with fewer",
            lambda: Buckets(link, BucketOptions(lanes)),
        ),
        ("size 2 is not a multiple of node_size 3", lambda: Buckets(link, BucketOptions(nodes))),
    ]
    for words, call in cases:
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    assert torch.equal(four, torch.ones(4))
    handle = buckets.reduce_scatter(four)
    for part in (four, four[1:3]):
        with pytest.raises(ValueError, match="on their way already; wait for that exchange first"):
            buckets.all_gather(part)
    handle.wait()
    assert torch.equal(shard(four, 2, rank), torch.full((2,), 2.0))


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


def many(rank: int, remembered: int) -> None:
    """More than two stretches of the ledger; one rank waits at the end, the other each time."""
    buckets = Buckets(new_link(), BucketOptions(Schedule(lanes=1, chunks=2), scratch_bytes=0))
    tensors = [torch.ones(8) for _ in range(200)]
    handles = []
    with mock.patch.object(agreement, "_MOST_AGREED", remembered):
        for number, tensor in enumerate(tensors):
            handles.append(buckets.reduce_scatter(tensor, average=bool(number % 2)))
            if rank:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
    for number, tensor in enumerate(tensors):
        assert (shard(tensor, 2, rank) == (1 if number % 2 else 2)).all()


@pytest.mark.parametrize("remembered", [1, 4096])
def test_many_buckets_wait_for_no_rank_that_waits(ranks, remembered: int) -> None:
    """Nor where the ranks forget what they agreed on, and compare it again."""
    ranks(2).run(many, remembered)
