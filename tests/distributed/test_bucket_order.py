"""Buckets that are started together and waited for in any order, or row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.plan.instructions import Post
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import transport, watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.distributed.test_buckets import BF16, data, shard

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


def posts_in_batches(rank: int) -> list[tuple[int, int, int]]:
    """(lane, number of the bucket, step) of each batch, with waits that depend on the rank."""
    link = transport(True)
    options = BucketOptions(Schedule(lanes=2, chunks=3), scratch_bytes=0)
    for _, _, handle in start_all(rank, link, options, 0):
        handle.wait()
    posts: list[tuple[int, int, int]] = []
    numbers: dict[Running, int] = {}

    def logged(running: Running, one: Post) -> None:
        sent = one.send.transfer
        posts.append((sent.lane, numbers[running], sent.step))

    def numbered(self: Transport, *args: Any) -> Running:
        running = begin(self, *args)
        numbers[running] = len(numbers)
        return running

    begin = Transport.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "begin", numbered)
        watch_posts(patch, logged)
        for place, (_, _, handle) in enumerate(start_all(rank, link, options, 0)):
            if place % (rank + 1) == rank:
                handle.wait()
        handle.wait()
    return posts


def test_batches_are_posted_in_one_order(ranks) -> None:
    """On HCCL they match by it; gloo would take some wrong orders without complaint."""
    posts = ranks(3).run(posts_in_batches)
    order = [(number, step) for _, number, step in posts[0]]
    assert order == sorted(order)
    assert len(order) == sum(2 * min(3, elements) for elements in SIZES)
    assert posts[1] == posts[2] == posts[0]


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


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@pytest.mark.parametrize("last_first", [False, True])
@on_ranks(3)
def test_rows_are_waited_for_one_by_one(rank: int, batched: bool, last_first: bool) -> None:
    """Three ranks, shards of 8 in four chunks of 2."""
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
        # The shard of rank r+1 comes from distance 2: the second transfer of each chunk.
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
