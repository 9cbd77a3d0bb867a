"""Attention over given runs of queries: the arithmetic of a fused op, unfused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.attention_mask import AttentionMask
from commfuse_npu.layers.attention_runs import AttentionRuns
from commfuse_npu.layers.differentiable import differentiable
from commfuse_npu.layers.documents import Documents

__all__ = ["blocked_attention"]


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    hidden: torch.Tensor | None = None,
    rows: Sequence[slice] | None = None,
    grad_rows: Sequence[slice] | None = None,
) -> torch.Tensor:
    """``softmax(q @ k^T * scale) @ v`` per head, differentiable, one kernel per run of queries.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``; ``A`` is a multiple of ``G``.
        causal: a query sees the keys up to its own position.
        documents, hidden: see :class:`~commfuse_npu.layers.attention_mask.AttentionMask`.
        rows: runs of queries for the forward; all at once by default.
        grad_rows: the same runs in the order of the backward.

    Returns:
        ``[S, B, A, D]``.
    """
    # Kernels take no empty tensors.
    everything = [slice(0, q.shape[0])] if q.numel() else []
    runs = everything if rows is None else list(rows)
    mask = AttentionMask(causal, documents, hidden).checked("blocked_attention", q)
    heads = q.contiguous(), k.contiguous(), v.contiguous()
    return differentiable(_BlockedAttention, *heads, mask, scale, runs, grad_rows or runs)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float | None,
        rows: Sequence[slice],
        grad_rows: Sequence[slice],
    ) -> torch.Tensor:
        attention = AttentionRuns(q, k, v, mask, scale, keep=True)
        for run in rows:
            attention.forward(run)
        attention.save(ctx)
        ctx.grad_rows = grad_rows
        assert attention.attended is not None
        return attention.attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention = AttentionRuns.saved(ctx, ctx.saved_tensors)
        grad = grad.contiguous()
        for run in ctx.grad_rows:
            attention.backward(run, grad[run])
        return *attention.gradients(), None, None, None, None
