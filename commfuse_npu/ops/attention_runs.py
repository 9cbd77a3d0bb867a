"""Attention in runs of queries: checks, options, forward and backward.

It calls a kernel once per run, in the order of a program, so that a fused op and its unfused form
add the gradients of keys and values in the same order.
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
    """Attention of one set of heads in runs of queries, forward and backward.

    Legend: ``S`` queries and keys, ``B`` batch, ``A`` query heads, ``G`` key heads, ``D`` features.

    Args:
        q: ``[S, B, A, D]``.
        k, v: ``[S, B, G, D]``.
        mask: which keys a query sees.
        scale: of the scores; ``D ** -0.5`` by default.
        keep: whether to keep what a backward needs.

    Attributes:
        attended: the whole output, ``[S, B, A, D]``, if it is kept; else ``None``.
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
        # Tensors of all runs in order, and the slice of them for each run, by its first row.
        self._statistics: list[torch.Tensor] = []
        self._where: dict[int, slice] = {}
        self._grads: list[torch.Tensor] = []

    def forward(self, run: slice) -> torch.Tensor:
        """The output for these queries, ``[rows, B, A, D]``."""
        keys, arguments = self._mask.of(run)
        attended, statistics = self._kernels.attention_forward(
            self._q[run],
            self._k[keys],
            self._v[keys],
            scale=self._scale,
            **arguments,
        )
        if self.attended is not None:
            self.attended[run] = attended
            first = len(self._statistics)
            self._where[run.start] = slice(first, first + len(statistics))
            self._statistics += statistics
        return attended

    def saved(self) -> tuple[Sequence[torch.Tensor | None], tuple[Any, ...]]:
        """The tensors for the backward, ``attended`` first, and its other state."""
        tensors = self.attended, self._q, self._k, self._v, *self._statistics
        return tensors, (self._mask, self._scale, self._where)

    @classmethod
    def again(cls, tensors: Sequence[torch.Tensor], state: tuple[Any, ...]) -> AttentionRuns:
        """Create the object for the backward from what :meth:`saved` returned."""
        attended, q, k, v, *statistics = tensors
        mask, scale, where = state
        runs = cls(q, k, v, mask, scale)
        runs.attended, runs._statistics, runs._where = attended, statistics, where
        # The gradients of keys and values are summed in fp32.
        wide = torch.promote_types(k.dtype, torch.float32)
        sums = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        runs._grads = [torch.empty_like(q), *sums]
        return runs

    def _kept(self, run: slice) -> Sequence[torch.Tensor]:
        return self._statistics[self._where[run.start]]

    def backward(self, grad: torch.Tensor, run: slice) -> None:
        """Run the backward for these queries; ``grad`` has the elements of their output."""
        assert self.attended is not None
        (keys, arguments), out = self._mask.of(run), self.attended[run]
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
            **arguments,
        )

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v, after the backward of all runs."""
        grad_q, grad_k, grad_v = self._grads
        return grad_q, grad_k.to(self._k.dtype), grad_v.to(self._v.dtype)


_TUNED_CHUNKS = 4
"""Used instead of tuning: attention is long enough to be cut, and on paced links 4 chunks were the
fastest, or within the spread, at every ratio of work to transfers."""


@lru_cache(maxsize=256)
def options_for_attention(
    options: LinearOptions, size: int, costs_rise: bool, *, scattered: bool = False
) -> LinearOptions:
    """The options for an op with attention: no taper, no ``collective``, and causal costs if
    ``costs_rise``.

    Attention saves the softmax statistics of each run of queries for the backward, where tapered
    chunks would be different runs.

    Args:
        costs_rise: whether later queries see more keys.
        scattered: whether the result is reduce-scattered; then 4 chunks replace tuning.
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
    """Check ``q_SBAD``, ``k_SBGD``, ``v_SBGD`` and the mask for ``size`` ranks; return the mask.

    Raises:
        TypeError: the dtype is not floating-point.
        ValueError: shapes, dtypes or the mask do not fit each other, the sequence is not divisible,
            or ``dropout`` is not 0.
    """
    if dropout:
        raise ValueError(
            f"{name}: dropout is {dropout}; the fused form has none, pass 0 or use Megatron's "
            "attention"
        )
    check_attention(q, k, v)
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
