"""Kernels in plain torch.  They run on every device and are the reference of any faster one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_npu.kernels.attention_arguments import (
    Piece,
    check_attention,
    check_hidden,
    check_sums,
)

__all__ = [
    "accumulate_weight_gradient",
    "attention_backward",
    "attention_forward",
    "gemm_into",
    "sum_parts",
]


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """See :meth:`Kernels.gemm_into`."""
    torch.mm(a, b, out=out)


def sum_parts(
    out: torch.Tensor,
    terms: Sequence[tuple[torch.Tensor, int]],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """See :meth:`Kernels.sum_parts`."""
    (first, parts), *others = terms
    if dtype is not None:
        stacked = first.view(parts, -1, first.shape[-1])
        total = stacked.sum(0, dtype=dtype) if parts > 1 else first.to(dtype)
        for term, count in others:
            for part in term.chunk(count):
                total.add_(part)
        out.copy_(total)
        return
    rest = [part for term, count in others for part in term.chunk(count)]
    total, *more = [*first.chunk(parts), *rest]
    if not more:
        out.copy_(total)
        return
    for part in more[:-1]:
        total.add_(part)
    torch.add(total, more[-1], out=out)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """See :meth:`Kernels.accumulate_weight_gradient`; product and sum in fp32, rounded once."""
    transposed = grad_output.t().float()
    if total.dtype == torch.float32:
        total.addmm_(transposed, total_input.float())
    else:
        total.copy_(torch.addmm(total.float(), transposed, total_input.float()))


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    pieces: Sequence[Piece] | None = None,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """See :meth:`Kernels.attention_forward`.  Computed in fp32 (fp64 stays), rounded once.

    The statistics are each row's largest score and its sum of exponentials above that, both
    ``[B, G, A/G * Sq, 1]``: their logarithm in one number would lose digits to the score.
    """
    check_attention(q, k, v, causal=causal)
    check_hidden(q, k, hidden)
    groups = k.shape[2]
    scores = _scores(q, k, causal, scale, pieces, hidden)
    # No keys, no rows: torch has no largest of nothing.
    highest = scores.amax(-1, keepdim=True) if k.shape[0] else scores.sum(-1, keepdim=True)
    if hidden is not None:
        highest.clamp_(min=torch.finfo(highest.dtype).min)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    if hidden is not None:  # a row of zeros for who sees nothing
        total.masked_fill_(total == 0, 1)
    out = weights.div_(total) @ _fold(v, groups)
    return _unfold(out, q), (highest, total)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    pieces: Sequence[Piece] | None = None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :meth:`Kernels.attention_backward`.

    ``grad_k`` and ``grad_v`` are added to without rounding to the dtype of ``k`` before.
    """
    check_attention(q, k, v, causal=causal)
    check_hidden(q, k, hidden)
    check_sums(k, grad_k, grad_v)
    groups = k.shape[2]
    highest, total = statistics
    weights = _scores(q, k, causal, scale, pieces, hidden).sub_(highest).exp_().div_(total)
    grad_out = _fold(grad, groups)
    # What a row of weights loses because they always sum to one.
    common = (grad_out * _fold(out, groups)).sum(-1, keepdim=True)
    change = (grad_out @ _fold(v, groups).mT).sub_(common).mul_(weights).mul_(_scale(q, scale))
    grad_q = _unfold(change @ _fold(k, groups), q)
    grad_k.add_((change.mT @ _fold(q, groups)).permute(2, 0, 1, 3))
    grad_v.add_((weights.mT @ grad_out).permute(2, 0, 1, 3))
    return grad_q


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _fold(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[S, B, A, D]`` to ``[B, G, A/G * S, D]``: one GEMM per key head, without repeating it."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    heads = x.unflatten(2, (groups, x.shape[2] // groups))
    return heads.permute(1, 2, 3, 0, 4).flatten(2, 3)


def _unfold(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_fold`, in the dtype of ``like``."""
    heads = like.shape[2] // x.shape[1]
    spread = x.unflatten(2, (heads, like.shape[0])).permute(3, 0, 1, 2, 4)
    return spread.flatten(2, 3).to(like.dtype).contiguous()


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    scale: float | None,
    pieces: Sequence[Piece] | None,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, G, A/G * Sq, Sk]``, ``-inf`` where a query may not look."""
    groups, queries, keys = k.shape[2], q.shape[0], k.shape[0]
    scores = (_fold(q, groups) @ _fold(k, groups).mT).mul_(_scale(q, scale))
    per_head = scores.unflatten(2, (q.shape[2] // groups, queries))
    if pieces is not None:
        hidden = _outside(pieces, q, keys)
    elif causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        per_head.masked_fill_(later.triu_(keys - queries + 1), -torch.inf)
    if hidden is not None:
        per_head.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    return scores


def _outside(pieces: Sequence[Piece], q: torch.Tensor, keys: int) -> torch.Tensor:
    """``[B, 1, Sq, Sk]``, True where no piece lets a query look."""
    hidden = torch.ones(q.shape[1], 1, q.shape[0], keys, dtype=torch.bool, device=q.device)
    for sample, rows, columns in pieces:
        piece = hidden[sample, 0, rows, columns]
        piece.triu_(piece.shape[1] - piece.shape[0] + 1)
    return hidden
