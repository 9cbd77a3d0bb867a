"""Buckets of ranks that disagree, of sums that fail, and with arguments that cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commfuse_npu import MismatchError, Schedule, TransportError
from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.ops.buckets import plain_all_gather_bucket, plain_reduce_scatter_bucket
from tests.distributed.programs import new_link, transport
from tests.distributed.ranks import on_ranks
from tests.distributed.test_buckets import BF16, FP32, data, shard

DISAGREE: dict[str, Callable[[Callable[..., Buckets], int], object]] = {
    "rows: 3 here, 4 there|rows: 4 here, 3 there": lambda made, rank: made().reduce_scatter(
        torch.ones(6 + 2 * rank)
    ),
    "path: [a-z_]+ here, [a-z_]+ there": lambda made, rank: made().reduce_scatter(
        torch.ones(4 * rank)
    ),
    "dtype: torch.[a-z0-9]+ here, torch": lambda made, rank: made().all_gather(
        torch.ones(4, dtype=(FP32, BF16)[rank])
    ),
    "sum_dtype: torch.[a-z0-9]+ here, torch": lambda made, rank: made(
        reduce_dtype=(None, FP32)[rank]
    ).reduce_scatter(torch.ones(4, dtype=BF16)),
    "options: .*(True|False).* here, .*(True|False).* there": lambda made, rank: (
        made().reduce_scatter(torch.ones(4), average=rank == 1)
    ),
    r"options: .*10.\) here, .*10.\) there": lambda made, rank: made(
        scratch_bytes=100 + rank
    ).reduce_scatter(torch.ones(4)),
    "options: (True|False) here, (True|False) there": lambda made, rank: made(
        last_first=rank == 1
    ).all_gather(torch.ones(4)),
    "operation: [a-z_]+_bucket here, [a-z_]+_bucket": lambda made, rank: (
        made().all_gather if rank else made().reduce_scatter
    )(torch.ones(4)),
}
"""What a rank is told, and what it does that the other one does not."""


@pytest.mark.parametrize("words", DISAGREE)
@on_ranks(2)
def test_ranks_that_disagree_are_told_what_about(rank: int, words: str) -> None:
    def made(**options: Any) -> Buckets:
        return Buckets(new_link(), BucketOptions(**options))

    with pytest.raises(MismatchError, match=words):
        DISAGREE[words](made, rank)


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
