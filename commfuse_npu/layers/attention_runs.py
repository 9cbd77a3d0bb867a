"""Attention run of queries by run of queries, and what a backward needs of its forward.

One call of a kernel per run, in the order of a program, so that a fused op and its plain form add
the gradients of keys and values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_npu.kernels import kernels_for

__all__ = ["AttentionRuns", "KeptRuns", "run_of_gemm"]


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


def run_of_gemm(run: slice, batch: int) -> slice:
    """A run of rows of the sequence as one of a GEMM's rows."""
    return slice(run.start * batch, run.stop * batch)
