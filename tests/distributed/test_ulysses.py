"""Ulysses: projection, attention and projection around exchanged heads, on gloo processes.

Masks, schedules, the order of work, bad input and planted faults; bits of all else are compared in
:mod:`tests.random_networks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import ops
from commfuse_npu.ops import head_groups
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.agreement import MismatchError
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.attention_masks import MASKS
from tests.distributed.programs import correct, transport, watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks.case import HEAD_FEATURES, Network, one_layer
from tests.random_networks.compare import run_case
from tests.random_networks.network_run import Call, input_of
from tests.random_networks.values import drawn

D = HEAD_FEATURES
EACH = (
    *("linear_all_to_all", "attention_all_to_all"),
    *("all_to_all_linear", "attention_all_to_all_linear"),
)
ATTEND = EACH[1::2]


def whole_layer(size: int, last: str = EACH[3], **changes: Any) -> Network:
    """A projection to heads, some of which two ranks share, and what follows it."""
    first = one_layer(EACH[0], size, shared=32, schedule=Schedule(lanes=1, chunks=3))
    return replace(first, layers=(first.layers[0], one_layer(last, size).layers[0]), **changes)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_process_and_the_plain_form(ranks: Any, size: int, dtype: torch.dtype) -> None:
    of = {"dtype": dtype}
    cases = [one_layer(op, size, keys=keys, **of) for op, keys in product(EACH, (1, 2))]
    cases += [one_layer(op, size, mask=mask, **of) for op in ATTEND for mask in ("full", *MASKS)]
    cases += [one_layer(EACH[0], size, shared=32, **of), whole_layer(size, **of)]
    ranks(size).run(correct, cases)


SCHEDULES = (
    Schedule(lanes=1),
    Schedule(lanes=3, chunks=4),
    Schedule(lanes=2, chunks=3, taper=2),
    Schedule(lanes=2, chunks=50),
)


@pytest.mark.parametrize("size", [2, 4])
def test_schedules(ranks: Any, size: int) -> None:
    every = [*SCHEDULES, Schedule(lanes=2, chunks=2, costs=tuple(range(1, size + 1)))]
    if size == 4:
        every.append(Schedule("two_level", lanes=2, chunks=2, node_size=2))
    ops = *EACH, "attention_linear_reduce_scatter"
    cases = [one_layer(op, size, schedule=of) for op, of in product(ops, every)]
    cases += [one_layer(op, size, schedule=every[2], batched=True) for op in ops]
    # Chunks of two and three rows: what the forward keeps of each is for the same rows.
    cases += [one_layer(op, size, rows=5) for op in ops]
    cases += [one_layer(op, size, mask="documents", schedule=every[3]) for op in ops[-1:]]
    ranks(size).run(correct, cases)


@on_ranks(2)
def test_heads_without_gradients(rank: int) -> None:
    """Gradients of those of queries, keys and values that want one, and of no others."""
    given = [drawn(rank, name, (12, 2, 2, D), torch.float32, rounded=True) for name in "qkv"]
    proj = drawn(0, "proj", (32, 64), torch.float32, rounded=True)
    link = transport()
    for wanted, op in product(((), (0,), (1,), (0, 2), (1, 2)), ATTEND):
        more = () if op == ATTEND[0] else (proj.clone().requires_grad_(),)
        results = []
        for carrier in (link, CollectiveTransport(link.group, same_pieces=True)):
            heads = [one.clone().requires_grad_(at in wanted) for at, one in enumerate(given)]
            y = getattr(ops, op)(*heads, *more, causal=True, transport=carrier)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            results.append([one.grad for one in heads])
        for at, (ours, plain) in enumerate(zip(*results, strict=True)):
            assert (ours is not None) == (plain is not None) == (at in wanted), (op, wanted)
            assert ours is None or torch.equal(ours, plain), (op, wanted)


SUMMED = {EACH[0]: "micro-batch 0, layer 0 x.grad", EACH[2]: "micro-batch 0, layer 0 y"}
"""What is summed over ranks in fp32, and is not made from something that was rounded."""


def rounded_twice(rank: int) -> list[str]:
    found = []
    for (op, name), keys in product(SUMMED.items(), (0, 32)):
        case = one_layer(op, 3, dtype=torch.bfloat16, shared=keys, bias="no")
        ours, exact = (run_case(case, form)[name] for form in ("fused", "exact"))
        assert ours is not None
        assert exact is not None
        half = torch.finfo(case.dtype).eps / 2 * exact.abs()
        if ((ours - exact).abs() > half + 1e-5 * exact.abs().max()).any():
            found.append(f"{case}: {name} is rounded more than once")
    return found


def test_sums_over_ranks_are_rounded_once(ranks: Any) -> None:
    assert not any(ranks(3).run(rounded_twice))


@on_ranks(2)
def test_bad_input_is_refused_before_anything_is_sent(rank: int) -> None:
    q, o = torch.zeros(12, 2, 2, D), torch.zeros(12, 2, 2 * D)
    k = v = torch.zeros(12, 2, 1, D)
    x, qkv, proj = torch.zeros(6, 2, 32), torch.zeros(128, 32), torch.zeros(32, 64)
    a, c = "linear_all_to_all", "all_to_all_linear"
    b, bc = "attention_all_to_all", "attention_all_to_all_linear"
    split = "attention_linear_reduce_scatter"
    one, two = slice(0, 64), slice(64, 128)
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        (a, (x, qkv[:127]), {}, "127 rows of the weight are not divisible by the group size 2; sa"),
        (a, (x, qkv), {"rows": [[one]]}, "given for 1 ranks, the group has 2; give one sequence"),
        (a, (x, qkv), {"rows": [[one], [one, two]]}, r"get \[64, 128\] rows of the weight; all"),
        (a, (x, qkv), {"rows": [[one], [slice(65, 129)]]}, r"slice\(65, 129, None\) is no run of"),
        (a, (x, qkv), {"rows": [[one], [slice(0, 128, 2)]]}, "128 with step 1"),
        (c, (o[:11], proj), {}, "sequence length 11 is not divisible by the group size 2; pad it "),
    ]
    k2, v2 = (tensor.repeat(1, 1, 2, 1) for tensor in (k, v))
    weight = torch.zeros(32, 32)
    for op, more in ((b, ()), (bc, (proj,)), (split, (weight,))):
        bad += [
            (op, (q, k, v, *more), {"dropout": 0.1}, "dropout is 0.1; the fused form has none"),
            (op, (q[:11], k[:11], v[:11], *more), {}, "11 is not divisible .* 2; pad it to 12"),
            (op, (q, k[:6], v[:6], *more), {}, "12 queries and 6 keys; self-attention has as many"),
            (op, (q[:, :, :1], k2, v2, *more), {}, "1 query heads are not a multiple of 2 key"),
            (op, (q.double(), k, v, *more), {}, "cast them to one dtype"),
        ]
    bad += [
        (a, (x[..., :31], qkv), {}, "x has 31 features, the weight takes 32"),
        (a, (x, qkv, qkv[:5, 0]), {}, r"the bias has shape \(5,\); it has to be \(128,\)"),
        (a, (x, qkv.bfloat16()), {}, "cast one of them"),
        (a, (x.to("meta"), qkv), {}, "x is on meta, the group transfers cpu tensors"),
        (c, (o, proj[:, :63]), {}, r"each of 2 ranks has 32 features .* takes 63 in all"),
        (c, (o, proj[0]), {}, r"weight \(64,\); they have to be"),
        (bc, (q, k, v, proj[:, :32]), {}, r"has to be \[H, 64\]"),
        (split, (q, k, v, proj), {}, "x has 32 features, the weight takes 64"),
        (b, [t.to("meta") for t in (q, k, v)], {}, "q is on meta, the group transfers cpu tensors"),
        (b, [t.int() for t in (q, k, v)], {}, "q is torch.int32; attention needs a floating-point"),
    ]
    link = transport()
    operations = link.operations
    for name, args, keywords, words in bad:
        more = {"causal": True} if "attention" in name else {}
        with pytest.raises((ValueError, TypeError), match=words):
            getattr(ops, name)(*args, transport=link, **keywords, **more)
    assert link.operations == operations, "something was sent"
    correct(rank, [one_layer(op, 2) for op in (bc, split)])


@on_ranks(2)
def test_other_rows_on_another_rank_are_noticed(rank: int) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    rows = [[slice(0, 64)], [slice(64, 128)]]
    with pytest.raises(MismatchError, match=r"do not call the same: rows: .* here"):
        ops.linear_all_to_all(
            torch.zeros(6, 2, 32),
            torch.zeros(128, 32),
            rows=rows if rank else rows[::-1],
            transport=link,
        )


# ----------------------------------------------------------------- order of work


def note_order(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Note sends, waits for what arrives, attention and GEMMs from now on, a word each."""

    def waits(running: Running, receives: Sequence[int], sends: Sequence[int]) -> None:
        events.extend(["wait"] * bool(receives))

    watch_posts(patch, lambda self, one: events.append("send") if one.send else None)
    watch_calls(patch, Running, "_wait", waits)
    for owner, name, word in (
        (AttentionRuns, "forward", "attend"),
        (AttentionRuns, "backward", "attend"),
        (head_groups.HeadGroups, "split", "gemm"),
        (head_groups.HeadGroups, "collect", "gemm"),
        (WeightGradient, "add", "wgrad"),
    ):
        watch_calls(patch, owner, name, lambda *_, word=word: events.append(word))


OUT, BACK = ["send"] * 2, "wait"
ORDERS = {
    # What is made leaves at once, own block last; what is used is waited for one by one, own first.
    EACH[0]: (["gemm", "send"] * 2 + ["gemm"], OUT + ["gemm", BACK] * 2 + ["gemm", "wgrad"]),
    EACH[1]: (["attend", "send"] * 2 + ["attend"], OUT + ["attend", BACK] * 2 + ["attend"]),
    # The weight gradient runs with the last transfers under way.
    EACH[2]: (
        OUT + ["gemm", BACK] * 2 + ["gemm"],
        ["gemm", "send"] * 2 + ["gemm", "wgrad", "wait"],
    ),
    # The own block is made last and used first: two pieces of work behind the last transfer.
    EACH[3]: (
        ["attend", "send"] * 2 + ["attend", "gemm", "wait", "gemm", "wait", "gemm"],
        ["gemm", "send"] * 2 + ["gemm", "wgrad", "attend", "wait", "attend", "wait", "attend"],
    ),
}


@pytest.mark.parametrize("op", ORDERS)
@on_ranks(3)
def test_order_of_work(rank: int, op: str) -> None:
    """What runs while transfers are under way, in the forward and in the backward of an op."""
    case = one_layer(op, dist.get_world_size(), mask="full", bias="no", schedule=Schedule())
    link, events = transport(), []
    call, x = Call(case, link=link), input_of(case, link=link)
    with pytest.MonkeyPatch.context() as patch:
        note_order(patch, events)
        y = call(x)
        forward = list(events)
        events.clear()
        y.backward(torch.ones_like(y))
    for found, expected in zip((forward, events), ORDERS[op], strict=True):
        assert found[: len(expected)] == expected
        assert set(found[len(expected) :]) <= {"wait"}
