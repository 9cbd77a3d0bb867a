"""Peak memory of fused attention ops above their plain forms, in bytes that torch allocated.

The attention kernel of a CPU stores the scores of all queries, that of a device stores none.  So
attention is measured with kernels that allocate their results and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from commfuse_npu import Schedule, Transport, ops
from commfuse_npu.ops import LinearOptions
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.scratch import ScratchPool
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT

SEQUENCE, HIDDEN, HEADS = 512, 128, 4
KERNELS = "commfuse_npu.ops.attention_runs.kernels_for"
BLOCK = SEQUENCE // 2 * HIDDEN * 4
"""Bytes of a shard of the hidden states."""


def attention_forward(q: Any, k: Any, v: Any, **_: Any) -> tuple[torch.Tensor, Any]:
    rows, batch, heads, _features = q.shape
    return torch.zeros_like(q), (torch.zeros(batch, heads, rows, 1),)


def attention_backward(grad: Any, q: Any, *others: torch.Tensor, **_: Any) -> torch.Tensor:
    k, v, *_saved, grad_k, grad_v = others
    grad_k.add_(torch.zeros_like(k))
    grad_v.add_(torch.zeros_like(v))
    return torch.zeros_like(q)


WITHOUT_SCORES = SimpleNamespace(
    attention_forward=attention_forward, attention_backward=attention_backward
)
"""Attention kernels that only allocate the tensors that those of a device return."""


def peak(op: Callable[..., torch.Tensor], tensors: list[torch.Tensor], **settings: Any) -> int:
    """Peak memory of forward and backward in bytes, results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y = op(*tensors, causal=True, options=LinearOptions(Schedule(lanes=2)), **settings)
        y.backward(torch.ones_like(y))
        for tensor in tensors:
            tensor.grad = None
    events = recorded.profiler.kineto_results.events()
    # One event per allocation, and a negative one per tensor that is freed.
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    most = max(accumulate(changes, initial=0))
    # It is part of a cycle; torch 2.13 crashes if it is freed after another profile was taken.
    recorded.profiler.kineto_results = None
    return most


@on_ranks(2)
def test_fused_attention_needs_no_more_than_two_blocks_above_the_plain_one(rank: int) -> None:
    transport = Transport.create(lanes=2, timeout=PATIENT)
    transport.scratch = ScratchPool(keep_bytes=0)
    shape = (SEQUENCE, 1, HEADS // 2, HIDDEN // HEADS)
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    weight = torch.randn(HIDDEN, HIDDEN // 2, requires_grad=True)
    plain = CollectiveTransport(transport.group)
    for name, more in (("attention_linear_reduce_scatter", [weight]), ("attention_all_to_all", [])):
        with mock.patch(KERNELS, return_value=WITHOUT_SCORES):
            call = getattr(ops, name), [*tensors, *more]
            extra = peak(*call, transport=transport) - peak(*call, transport=plain)
        # Blocks of [s, H] and [s, H / 2].
        block = BLOCK if name == "attention_linear_reduce_scatter" else BLOCK // 2
        assert extra <= 2 * block, (name, extra / block)
