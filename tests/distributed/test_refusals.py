"""Invalid calls are refused before anything is sent; ranks that disagree get the difference."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import MismatchError, Schedule, Transport, ops
from commfuse_npu.ops import (
    Buckets,
    Documents,
    LinearOptions,
    all_gather_linear,
    linear_reduce_scatter,
)
from tests.distributed.programs import gather_and_use, new_link
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import ATTENTION, Bucket, BucketRun, Case, one_layer
from tests.random_networks.compare import quiet, run_case

Call = Callable[[], object]
INT, LOW, FP32 = torch.int32, torch.bfloat16, torch.float32


def of_linears(made: Transport) -> list[tuple[str, Call]]:
    x, weight, bias, meta = torch.ones(4, 4), torch.ones(3, 4), torch.ones(3), "meta"
    fused, sink = partial(all_gather_linear, group=made), lambda piece, rows: None
    return [
        ("x is torch.int64; choose one of float32, bf", lambda: fused(x.long(), weight.long())),
        ("x is torch.float32, the weight torch.bfloat16; ", lambda: fused(x, weight.to(LOW))),
        ("x is torch.float32, the bias torch.bfloat16; c", lambda: fused(x, weight, bias.to(LOW))),
        ("x has 4 features, the weight takes 5", lambda: fused(x, torch.ones(3, 5))),
        (r"bias has shape \(4,\); it has to be \(3,\)", lambda: fused(x, weight, torch.ones(4))),
        (r"they have to be \[S, ..., I\] and \[O, I\]", lambda: fused(x[0], weight)),
        ("length 5 is not divisible by the group size 2; pad it to 6, or use linear_all_reduce",
         lambda: linear_reduce_scatter(torch.ones(5, 4), weight, group=made)),
        ("x is on cpu, the weight on meta; move one of", lambda: fused(x, weight.to(meta))),
        ("tensor is on meta, this group transfers cpu tensors; move it there",
         lambda: fused(x.to(meta), weight.to(meta))),
        (r"shape \(4, 3\) is not contiguous", lambda: gather_and_use(new_link(), weight.t(), sink)),
        (r"shard has shape \(4,\); it has to be a matrix",
         lambda: gather_and_use(new_link(), x[0], sink, shape=(2, 1))),
        ("torch.int32; partial sums need a floating", lambda: LinearOptions(reduce_dtype=INT)),
        ("reduce_dtype is a str; pass a dtype", lambda: LinearOptions(reduce_dtype="float32")),
        (r"schedule is a int; pass Schedule\(", lambda: LinearOptions(2)),
        ("tuning is a bool; pass Tuning", lambda: LinearOptions(tuning=True)),
        ("all_gather_linear: weight is None; pass a tensor", lambda: fused(x, None)),
        ("bias is a float; pass a tensor, or None", lambda: fused(x, weight, 1.0)),
        *(("it must be a whole number from 1", partial(new_link, lanes=n)) for n in (0, 1.5, True)),
        (r"options is a dict; pass LinearOptions\(", lambda: fused(x, weight, options={})),
        (r"transport is a str; pass what Transport\.create", lambda: Buckets("a group")),
        ("group is a str; pass a process group, or", lambda: fused(x, weight, group="a group")),
        (r"no lanes; call Transport\.create\(group\) once, on every process",
         lambda: fused(x, weight, group=dist.new_group(backend="gloo"))),
    ]  # fmt: skip


def of_heads(made: Transport) -> list[tuple[str, Call]]:
    q = torch.zeros(12, 2, 2, 16)
    k = v = torch.zeros(12, 2, 1, 16)
    x, qkv, proj = torch.zeros(6, 2, 32), torch.zeros(128, 32), torch.zeros(32, 64)
    split = partial(ops.linear_all_to_all, x, group=made)
    join = partial(ops.all_to_all_linear, group=made)
    attend = partial(ops.attention_all_to_all, group=made, causal=True)
    project = partial(attend, q, k, v)
    scatter = partial(ops.attention_linear_reduce_scatter, group=made, causal=True)
    documents, other = Documents([12, 24], 12, 2), Documents([12], 12)
    return [
        ("127 rows of the weight are not divisible .* 2; repeat", lambda: split(qkv[:127])),
        ("11 is not divisible by the group size 2; pad it", lambda: join(q[:11].flatten(2), proj)),
        (r"32 features on each of 2 ranks, .* 63", lambda: join(q.flatten(2), proj[:, :63])),
        ("11 is not divisible .* 2; pad it to 12", lambda: attend(q[:11], k[:11], v[:11])),
        ("12 queries and 6 keys; self-attention has as many", lambda: attend(q, k[:6], v[:6])),
        (r"have to be \[Sq, B, A, D\]", lambda: attend(*(t.flatten(2) for t in (q, k, v)))),
        (r"k \(12, 1, 1, 16\), .* do not fit", lambda: attend(q, k[:, :1], v[:, :1])),
        ("1 query heads are not a multiple of 2 key", lambda: attend(k, q, q)),
        ("cast them to one dtype", lambda: attend(q.double(), k, v)),
        ("q is torch.int32; attention needs", lambda: attend(*(t.int() for t in (q, k, v)))),
        (r"has to be \[O, 64\]", lambda: project(proj[:, :32])),
        (r"bias of shape \(32,\) without a weight; pass", lambda: project(bias=proj[:, 0])),
        ("x has 32 features, the weight takes 64", lambda: scatter(q, k, v, proj)),
        ("documents of 1 samples of 12 are", lambda: attend(q, k, v, documents=other)),
        (r"documents is a list; pass Documents\(", lambda: attend(q, k, v, documents=[12, 24])),
        ("attention_all_to_all: v is None; pass a tensor", lambda: attend(q, k, None)),
        (r"options is a dict; pass LinearOptions\(", lambda: attend(q, k, v, options={})),
        *(("group is a str; pass a process group, or", call) for call in (
            lambda: split(qkv, group="a group"),
            lambda: join(q.flatten(2), proj, group="a group"),
        )),
        ("documents are causal", lambda: attend(q, k, v, causal=False, documents=documents)),
    ]  # fmt: skip


def of_buckets(made: Transport) -> list[tuple[str, Call]]:
    buckets, four, ints = Buckets(made), torch.ones(4), torch.ones(4, dtype=INT)
    wide = Buckets(made, LinearOptions(reduce_dtype=FP32))
    nodes = Schedule("two_level", node_size=3)
    five, pad = torch.ones(5), "5 elements are not divisible .* size 2; pad the bucket to 6"
    return [
        (r"shape \(2, 2\) .* pass the flat buffer", lambda: buckets.all_gather(torch.ones(2, 2))),
        ("bucket is a list; pass a tensor", lambda: buckets.reduce_scatter([1.0])),
        (r"options is a Schedule; pass LinearOptions\(", lambda: Buckets(made, nodes)),
        (r"strides \(2,\)", lambda: buckets.reduce_scatter(torch.ones(8)[::2])),
        (pad, lambda: buckets.reduce_scatter(five)),
        *(("the bucket is torch.int32; an average, a scale and a", call) for call in (
            lambda: buckets.reduce_scatter(ints, average=True),
            lambda: buckets.reduce_scatter(ints, scale=0.5),
            lambda: wide.reduce_scatter(ints),
        )),
        ("size 2 is not a multiple of node_size 3",
         lambda: Buckets(made, LinearOptions(nodes)).all_gather(four)),
    ]  # fmt: skip


@pytest.mark.parametrize("of", [of_linears, of_heads, of_buckets])
@on_ranks(2)
def test_inputs_that_cannot_work_are_refused(rank: int, of: Any) -> None:
    """Every rank raises before anything is sent, and the transport remains usable."""
    transport = new_link()
    for words, call in of(transport):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
    assert transport.operations == 0
    y = all_gather_linear(torch.ones(4, 4), torch.ones(3, 4), group=transport)
    assert torch.equal(y, torch.full((8, 3), 4.0))


# -------------------------------------------------------------------- ranks that disagree


LINEAR = partial(one_layer, "all_gather_linear", 2)
SCATTER = partial(one_layer, "linear_reduce_scatter", 2)
SUM = partial(one_layer, "linear_all_reduce", 2, batch=None)


def bucket(elements: int = 2, wide: bool = False, **options: Any) -> BucketRun:
    return BucketRun(2, (Bucket(elements, **options),), wide=wide)


DIFFER: list[tuple[Case, Case, str]] = [
    (LINEAR(), LINEAR(rows=7), "rows: .. here, .. there"),
    (LINEAR(), LINEAR(dtype=LOW), "dtype: torch.[a-z0-9]+ here, torch.[a-z0-9]+ there"),
    (LINEAR(), SCATTER(), "operation: .*linear.* here, .*linear.* there"),
    (LINEAR(), LINEAR(schedule=Schedule()), "schedule: .* chunks here, .* chunks there"),
    (SCATTER(), SCATTER(main_grad=FP32), "options: .*main_grad=True.* (here|there)"),
    (LINEAR(), LINEAR(weight_grad=False), "wgrad: .* here, .* there"),
    (LINEAR(), LINEAR(rows=0), "path: .* here, .* there"),
    (SUM(), SUM(rows=5), "path: .* here, .* there"),  # both are padded to six
    (*(one_layer(op, 2) for op in ATTENTION[1:]), "operation: attention_all_to_all.* here, att"),
    (bucket(), bucket(3), "rows: . here, . there"),
    (bucket(), bucket(0), "path: [A-Za-z]+ here, [A-Za-z]+ there"),
    (bucket(), bucket(gather=True), "operation: [a-z_]+_bucket here, [a-z_]+_bucket"),
    (bucket(gather=True), bucket(gather=True, dtype=LOW), "dtype: torch.[a-z0-9]+ here"),
    (bucket(dtype=LOW), bucket(wide=True, dtype=LOW), "sum_dtype: torch.[a-z0-9]+ here, torch"),
    (bucket(), bucket(average=True), "options: .*(True|False).* here, .*(True|False).* there"),
]  # fmt: skip
"""What ranks 0 and 1 call, and the expected message."""


@pytest.mark.parametrize("number", range(len(DIFFER)))
@on_ranks(2)
def test_ranks_that_disagree_are_told_what_about(rank: int, number: int) -> None:
    *of_ranks, words = DIFFER[number]
    with quiet(), pytest.raises(MismatchError, match=words) as caught:
        run_case(of_ranks[rank], "fused", new_link())
    named = r"rank (.) and peer (?!\1). of the group call different operations"
    assert re.search(named, str(caught.value))
    assert "Nothing was sent; call the same operation on all ranks" in str(caught.value)


@on_ranks(3)
def test_lanes_that_differ_or_do_not_exist(rank: int) -> None:
    with pytest.raises(MismatchError, match=r"different numbers of lanes .*rank 0: 1, rank 1: 2"):
        new_link(lanes=1 + rank)
    transport, x, weight = new_link(lanes=1), torch.ones(4, 4), torch.ones(3, 4)
    options = LinearOptions(Schedule(lanes=2))
    with pytest.raises(ValueError, match="uses 2 lanes, the transport has 1; create it"):
        all_gather_linear(x, weight, group=transport, options=options)
    # A schedule without a number of lanes uses those of the transport.
    assert all_gather_linear(x, weight, group=transport).shape == (12, 3)
    bucket = torch.ones(12)
    Buckets(transport).reduce_scatter(bucket).wait()
    assert (bucket.view(3, 4)[rank] == 3).all()


@on_ranks(3)
def test_a_process_without_a_group_is_named_on_all_of_them(rank: int) -> None:
    words = r"Transport.create: rank 2 has no process group.*made by calling new_group\(\[rank\]\)"
    pair = dist.new_group([0, 1])
    with pytest.raises(TypeError, match=words):
        new_link(pair)
    own = dist.new_group([2])
    assert new_link(pair if rank < 2 else own).size == (2 if rank < 2 else 1)
