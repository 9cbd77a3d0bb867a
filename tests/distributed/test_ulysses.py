"""Ulysses: what runs while heads are under way, on gloo processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.ops import head_groups
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import transport, watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import one_layer
from tests.random_networks.network_run import Call, input_of


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
    "linear_all_to_all": (
        ["gemm", "send"] * 2 + ["gemm"],
        OUT + ["gemm", BACK] * 2 + ["gemm", "wgrad"],
    ),
    "attention_all_to_all": (
        ["attend", "send"] * 2 + ["attend"],
        OUT + ["attend", BACK] * 2 + ["attend"],
    ),
    # The weight gradient runs with the last transfers under way.
    "all_to_all_linear": (
        OUT + ["gemm", BACK] * 2 + ["gemm"],
        ["gemm", "send"] * 2 + ["gemm", "wgrad", "wait"],
    ),
    # The own block is made last and used first: two pieces of work behind the last transfer.
    "attention_all_to_all_linear": (
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
