"""Attention by runs of queries, without transfers: that of the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.ops.attention_runs import AttentionRuns

__all__ = ["blocked_attention"]


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rows: Sequence[slice],
) -> torch.Tensor:
    """Causal ``softmax(q @ k^T * D ** -0.5) @ v`` per head, one kernel per run of queries.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``; ``A`` is a multiple of ``G``.

    Returns:
        ``[S, B, A, D]``.
    """
    heads = q.contiguous(), k.contiguous(), v.contiguous()
    attended: torch.Tensor = _BlockedAttention.apply(*heads, rows)
    return attended


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Sequence[slice],
    ) -> torch.Tensor:
        attention = AttentionRuns(q, k, v, AttentionMask(causal=True), None, keep=True)
        for run in rows:
            attention.forward(run)
        tensors, ctx.state = attention.saved()
        ctx.save_for_backward(*tensors)
        ctx.rows = rows
        assert attention.attended is not None
        return attention.attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention = AttentionRuns.again(ctx.saved_tensors, ctx.state)
        grad = grad.contiguous()
        for run in ctx.rows:
            attention.backward(grad[run], run)
        return *attention.gradients(), None
