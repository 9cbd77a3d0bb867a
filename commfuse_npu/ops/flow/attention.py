"""Causal attention of a sequence that arrives chunk by chunk.

The queries of chunk j see the keys of chunks 0 to j.  Keys and values are written side by side as
they come; in the backward, which begins with the last chunk, the gradients of chunk j are complete
when its own queries are done, since those of all later chunks are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops.flow.transfers import token

__all__ = ["CausalChunks"]


class CausalChunks:
    """The attention of one layer in one pass.

    Args:
        chunks: how many will come.
        scale: of the scores, ``D ** -0.5`` by default.
    """

    def __init__(self, chunks: int, scale: float | None = None) -> None:
        self.chunks, self.scale = chunks, scale
        self.come = 0
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.grad_k: torch.Tensor | None = None
        self.grad_v: torch.Tensor | None = None
        # One chunk after the other in the graph, too, whatever else there is in it.
        self._order: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the next chunk.

        Equals the rows of the chunk in causal attention of the whole sequence.

        Args:
            q: ``[S / c, B, A, D]``.
            k, v: ``[S / c, B, G, D]``; ``A`` is a multiple of ``G``.

        Returns:
            ``[S / c, B, A, D]``.
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        order = q.new_empty(0) if self._order is None else self._order
        out, self._order = _Attend.apply(q, k, v, order, self, self.come)
        self.come += 1
        return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        order: torch.Tensor,
        chunks: CausalChunks,
        number: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = q.shape[0]
        if chunks.k is None or chunks.v is None:
            chunks.k = k.new_empty((chunks.chunks * rows, *k.shape[1:]))
            chunks.v = torch.empty_like(chunks.k)
        run, seen = slice(number * rows, (number + 1) * rows), slice(0, (number + 1) * rows)
        chunks.k[run], chunks.v[run] = k, v
        out, statistics = kernels_for(q.device).attention_forward(
            q, chunks.k[seen], chunks.v[seen], causal=True, scale=chunks.scale
        )
        saved = [q, out, *statistics]
        ctx.last = number == chunks.chunks - 1
        if ctx.last:
            # All of them, once, for all chunks.
            saved += [chunks.k, chunks.v]
            chunks.k = chunks.v = None
        ctx.save_for_backward(*saved)
        ctx.call = chunks, run, seen
        return out, token(q, (0,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chunks, run, seen = ctx.call
        q, out, *statistics = ctx.saved_tensors
        if ctx.last:
            *statistics, chunks.k, chunks.v = statistics
            wide = torch.promote_types(q.dtype, torch.float32)
            chunks.grad_k = torch.zeros_like(chunks.k, dtype=wide)
            chunks.grad_v = torch.zeros_like(chunks.v, dtype=wide)
        grad_q = kernels_for(q.device).attention_backward(
            grad,
            q,
            chunks.k[seen],
            chunks.v[seen],
            out,
            statistics,
            causal=True,
            scale=chunks.scale,
            grad_k=chunks.grad_k[seen],
            grad_v=chunks.grad_v[seen],
        )
        grad_k, grad_v = (of[run].to(q.dtype) for of in (chunks.grad_k, chunks.grad_v))
        if run.start == 0:
            chunks.k = chunks.v = chunks.grad_k = chunks.grad_v = None
        return grad_q, grad_k, grad_v, token(q, (0,)), None, None
