"""Attention over given runs of queries: the arithmetic of a fused op, unfused.

One call of a kernel per run of queries, in the order of a program, so that a fused op and its plain
form add the gradients of keys and values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import kernels_for

__all__ = ["AttentionRuns", "KeptRuns", "blocked_attention"]


class AttentionRuns:
    """Attention of one set of heads, run of queries by run of queries, forward and backward.

    Legend: ``S`` queries and keys, ``B`` batch, ``A`` query heads, ``G`` key heads, ``D`` features.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``.
        causal: a query sees the keys up to its own position; else all of them.
        scale: of the scores, ``D ** -0.5`` by default.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
    ) -> None:
        self._q, self._k, self._v = q, k, v
        self._causal, self._scale = causal, scale
        self._kernels = kernels_for(q.device)

    def _keys(self, run: slice) -> slice:
        """Which keys a run of queries may see."""
        return slice(0, run.stop) if self._causal else slice(None)

    def forward(self, run: slice) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output for these queries, ``[rows, B, A, D]``, and what the backward needs."""
        keys = self._keys(run)
        return self._kernels.attention_forward(
            self._q[run], self._k[keys], self._v[keys], causal=self._causal, scale=self._scale
        )

    def begin_backward(self) -> None:
        """Make room for the gradients; keys and values sum theirs in fp32."""
        wide = torch.promote_types(self._k.dtype, torch.float32)
        self.grad_q = torch.empty_like(self._q)
        self._grad_k = torch.zeros_like(self._k, dtype=wide)
        self._grad_v = torch.zeros_like(self._v, dtype=wide)

    def backward(
        self,
        run: slice,
        grad: torch.Tensor,
        out: torch.Tensor,
        statistics: Sequence[torch.Tensor],
    ) -> None:
        """Use the gradient of these queries' output, ``[rows, B, A, D]``."""
        keys = self._keys(run)
        grad_q, _, _ = self._kernels.attention_backward(
            grad,
            self._q[run],
            self._k[keys],
            self._v[keys],
            out,
            statistics,
            causal=self._causal,
            scale=self._scale,
            grad_k=self._grad_k[keys],
            grad_v=self._grad_v[keys],
        )
        self.grad_q[run] = grad_q

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v, when all runs are through."""
        return self.grad_q, self._grad_k.to(self._k.dtype), self._grad_v.to(self._v.dtype)


class KeptRuns:
    """What a backward needs of a forward: its whole output, and the statistics of each run.

    Attributes:
        attended: ``[S, B, A, D]``.
        statistics: of all runs, in the order in which they ran.
        where: which of them are those of the run that begins at a row.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self.attended = torch.empty_like(like)
        self.statistics: list[torch.Tensor] = []
        self.where: dict[int, slice] = {}

    def add(self, run: slice, attended: torch.Tensor, statistics: Sequence[torch.Tensor]) -> None:
        """Keep the result of :meth:`AttentionRuns.forward`."""
        self.attended[run] = attended
        self.where[run.start] = slice(len(self.statistics), len(self.statistics) + len(statistics))
        self.statistics += statistics


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    rows: Sequence[slice] | None = None,
    grad_rows: Sequence[slice] | None = None,
) -> torch.Tensor:
    """``softmax(q @ k^T * scale) @ v`` per head, differentiable, one kernel per run of queries.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``; ``A`` is a multiple of ``G``.
        causal: a query sees the keys up to its own position.
        rows: runs of queries for the forward; all at once by default.
        grad_rows: the same runs in the order of the backward.

    Returns:
        ``[S, B, A, D]``.
    """
    # Kernels take no empty tensors.
    everything = [slice(0, q.shape[0])] if q.numel() else []
    runs = everything if rows is None else list(rows)
    out: torch.Tensor = _BlockedAttention.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), causal, scale, runs, grad_rows or runs
    )
    return out


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        rows: Sequence[slice],
        grad_rows: Sequence[slice],
    ) -> torch.Tensor:
        attention = AttentionRuns(q, k, v, causal, scale)
        kept = KeptRuns(q)
        for run in rows:
            kept.add(run, *attention.forward(run))
        ctx.save_for_backward(q, k, v, kept.attended, *kept.statistics)
        ctx.where = kept.where
        ctx.settings = causal, scale, grad_rows
        return kept.attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        causal, scale, grad_rows = ctx.settings
        attention = AttentionRuns(q, k, v, causal, scale)
        attention.begin_backward()
        for run in grad_rows:
            attention.backward(run, grad[run], out[run], kept[ctx.where[run.start]])
        return *attention.gradients(), None, None, None, None
