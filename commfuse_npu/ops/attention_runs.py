"""Attention run of queries by run of queries: its arguments, options, forward and backward.

One call of a kernel per run, in the order of a program, so that a fused op and its plain form add
the gradients of keys and values in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from commfuse_npu.kernels import kernels_for
from commfuse_npu.kernels.cpu import check_attention
from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.ops.call import check_sequence
from commfuse_npu.ops.options import LinearOptions

__all__ = [
    "AttentionRuns",
    "checked_attention",
    "options_for_attention",
]


class AttentionRuns:
    """Attention of one set of heads, run of queries by run of queries, forward and backward.

    Legend: ``S`` queries and keys, ``B`` batch, ``A`` query heads, ``G`` key heads, ``D`` features.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``.
        mask: which keys a query sees.
        scale: of the scores, ``D ** -0.5`` by default.
        keep: what a backward needs.

    Attributes:
        attended: the whole output, ``[S, B, A, D]``, if it is kept.
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float | None,
        *,
        keep: bool = False,
    ) -> None:
        self._q, self._k, self._v = q.contiguous(), k.contiguous(), v.contiguous()
        self._mask, self._scale = mask, scale
        self._kernels = kernels_for(q.device)
        self.attended = torch.empty_like(self._q) if keep else None
        # Of all runs, in the order in which they ran, and where those of a run are, by its start.
        self._statistics: list[torch.Tensor] = []
        self._where: dict[int, slice] = {}
        self._grads: list[torch.Tensor] = []

    def forward(self, run: slice) -> torch.Tensor:
        """The output for these queries, ``[rows, B, A, D]``."""
        keys, told = self._mask.of(run)
        attended, statistics = self._kernels.attention_forward(
            self._q[run],
            self._k[keys],
            self._v[keys],
            scale=self._scale,
            **told,
        )
        if self.attended is not None:
            self.attended[run] = attended
            first = len(self._statistics)
            self._where[run.start] = slice(first, first + len(statistics))
            self._statistics += statistics
        return attended

    def saved(self) -> tuple[Sequence[torch.Tensor | None], tuple[Any, ...]]:
        """The tensors that the backward needs, ``attended`` first, and what else it needs."""
        tensors = self.attended, self._q, self._k, self._v, *self._statistics
        return tensors, (self._mask, self._scale, self._where)

    @classmethod
    def again(cls, tensors: Sequence[torch.Tensor], state: tuple[Any, ...]) -> AttentionRuns:
        """For the backward, from what was :meth:`saved`."""
        attended, q, k, v, *statistics = tensors
        mask, scale, where = state
        found = cls(q, k, v, mask, scale)
        found.attended, found._statistics, found._where = attended, statistics, where
        # Keys and values sum their gradients in fp32.
        wide = torch.promote_types(k.dtype, torch.float32)
        sums = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        found._grads = [torch.empty_like(q), *sums]
        return found

    def _kept(self, run: slice) -> Sequence[torch.Tensor]:
        return self._statistics[self._where[run.start]]

    def backward(self, grad: torch.Tensor, run: slice) -> None:
        """Use the gradient of these queries' output, of as many elements."""
        assert self.attended is not None
        (keys, told), out = self._mask.of(run), self.attended[run]
        grad_q, grad_k, grad_v = self._grads
        grad_q[run] = self._kernels.attention_backward(
            grad.view(out.shape),
            self._q[run],
            self._k[keys],
            self._v[keys],
            out,
            self._kept(run),
            grad_k[keys],
            grad_v[keys],
            scale=self._scale,
            **told,
        )

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v, when all runs are through."""
        grad_q, grad_k, grad_v = self._grads
        return grad_q, grad_k.to(self._k.dtype), grad_v.to(self._v.dtype)


_TUNED_CHUNKS = 4
"""Instead of trying: attention is long enough to be cut, and on paced links 4 was fastest or within
the spread at every ratio."""


@lru_cache(maxsize=256)
def options_for_attention(
    options: LinearOptions, size: int, costs_rise: bool, *, scattered: bool = False
) -> LinearOptions:
    """Chunks of one length, in batches; if later queries see more keys, blocks in the order that
    waits least.

    Attention keeps the statistics of each piece of queries for the backward: that runs the other
    way round, and tapered pieces would have other rows.

    Args:
        scattered: whether the result is reduce-scattered; then no schedule is tried out.
    """
    schedule = replace(options.schedule, taper=1.0)
    if schedule.shape == "collective":
        schedule = replace(schedule, shape="shifted")
    if scattered and options.tuning is not None:
        schedule = replace(schedule, chunks=_TUNED_CHUNKS)
        options = replace(options, tuning=None)
    return replace(options, schedule=schedule.for_causal_blocks(size) if costs_rise else schedule)


def checked_attention(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: AttentionMask,
    dropout: float,
    size: int,
    instead: str = "",
) -> AttentionMask:
    """The mask as it is for ``q_SBAD``, ``k_SBGD`` and ``v_SBGD`` over blocks of ``size`` ranks.

    Raises:
        TypeError: they are not floating-point numbers.
        ValueError: shapes, dtypes or the mask do not fit each other, the sequence is not divisible,
            or dropout is asked for.
    """
    if dropout:
        raise ValueError(
            f"{name}: dropout is {dropout}; the fused form has none, pass 0 or use Megatron's "
            "attention"
        )
    check_attention(q, k, v, causal=False)
    if not q.is_floating_point():
        raise TypeError(f"{name}: q is {q.dtype}; attention needs a floating-point dtype")
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{name}: {q.shape[0]} queries and {k.shape[0]} keys; self-attention has as many of "
            "one as of the other"
        )
    mask = mask.checked(name, q)
    check_sequence(name, q.shape[0], size, instead)
    return mask
