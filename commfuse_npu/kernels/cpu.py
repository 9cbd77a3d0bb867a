"""Kernels in plain torch.  They run on every device and are the reference of faster kernels.

Legend: ``S`` rows of the sequence, ``B`` batch, ``A`` query heads, ``G`` key heads (``A`` is a
multiple of ``G``; query head ``a`` uses key head ``a // (A / G)``), ``D`` features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = [
    "AttentionPiece",
    "accumulate_weight_gradient",
    "attention_backward",
    "attention_forward",
    "check_attention",
    "gemm_into",
    "sum_parts",
]


class AttentionPiece(NamedTuple):
    """Queries of one document in one sample of a batch, and the keys that they see.

    The keys start with the document and end with the last query.  A query sees the keys up to its
    own position: causal, aligned at the last query and the last key.

    Attributes:
        sample: index in the batch.
        queries, keys: rows of the kernel's ``q``, and of its ``k`` and ``v``; not empty.
    """

    sample: int
    queries: slice
    keys: slice


def gemm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b`` without a temporary: ``[m, k] @ [k, n] -> [m, n]``.

    Args:
        out: may be some rows of a larger tensor.
        a, b: of the dtype of ``out``.
    """
    torch.mm(a, b, out=out)


def sum_parts(
    out: torch.Tensor,
    terms: Sequence[tuple[torch.Tensor, int]],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """``out = parts[0] + parts[1] + ...``, the parts of all terms in order.

    Every addition is rounded to the dtype of ``out``.  With ``dtype``, additions use that dtype and
    only the result is rounded.

    Args:
        out: ``[s, columns]``; may be some columns of a wider matrix, or the first term.
        terms: ``(tensor, k)``: a stack of k parts ``[k * s, columns]``, contiguous for k > 1.
            The first tensor may be overwritten.
    """
    if dtype is not None:
        (first, parts), *others = terms
        stacked = first.view(parts, -1, first.shape[-1])
        total = stacked.sum(0, dtype=dtype) if parts > 1 else first.to(dtype)
        for term, count in others:
            for part in term.chunk(count):
                total.add_(part)
        out.copy_(total)
        return
    # chunk() makes views, which costs time: not for a term of one part.
    total, *more = [
        part for term, count in terms for part in (term.chunk(count) if count > 1 else (term,))
    ]
    if not more:
        out.copy_(total)
        return
    for part in more[:-1]:
        total.add_(part)
    torch.add(total, more[-1], out=out)


def accumulate_weight_gradient(
    total: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor
) -> None:
    """``total += grad_output^T @ total_input``.

    Args:
        total: ``[O, I]``, fp32, bf16 or fp16, changed in place.
        grad_output: ``[S, O]``.
        total_input: ``[S, I]``, the dtype of ``grad_output``.

    Product and sum in fp32, rounded once.
    """
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
    pieces: Sequence[AttentionPiece] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Attention of a chunk of queries over all keys that they may see.

    Equals, with the key heads repeated to ``A``::

        scores = q @ k^T * scale
        if causal:
            scores[i, j] = -inf where j > i + (Sk - Sq)
        out = softmax(scores) @ v

    and with pieces, per piece::

        out[queries, sample] = causal attention(q[queries, sample], k[keys, sample], ...)

    So ``q[q0:q1]`` against ``k[:q1], v[:q1]`` gives the rows ``q0:q1`` of causal attention: the
    last query sees the last key.

    Args:
        q: ``[Sq, B, A, D]``.  Rows of a larger contiguous tensor are not copied.
        k, v: ``[Sk, B, G, D]``, the dtype of ``q``.
        causal: needs ``Sq <= Sk``.
        scale: of the scores; ``D ** -0.5`` by default.
        pieces: of packed documents; needs ``causal``.  They cover all queries of sample 0 in order,
            then those of the next sample, and the keys of each sample from its first piece to its
            last without a gap.

    Returns:
        The output, of the shape and dtype of ``q``, and tensors with the statistics of the softmax
        for :func:`attention_backward` of the same kernels; their contents depend on the device.

    The arguments are not checked: call :func:`check_attention` before.

    Computed in fp32 (fp64 stays), rounded once.  Here the statistics are each row's largest score
    and the sum of ``exp(score - largest)``, both ``[B, G, A/G * Sq, 1]``; a single logsumexp would
    lose digits.
    """
    groups = k.shape[2]
    scores = _scores(q, k, causal, scale, pieces)
    # amax() of no keys raises, sum() does not.
    highest = scores.amax(-1, keepdim=True) if k.shape[0] else scores.sum(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
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
    pieces: Sequence[AttentionPiece] | None = None,
) -> torch.Tensor:
    """The gradients of q, k and v for one call of :func:`attention_forward`.

    Args:
        grad: the gradient of ``out``, ``[Sq, B, A, D]``.
        out, statistics: what the forward returned.
        grad_k, grad_v: ``[Sk, B, G, D]``.  The gradients of this chunk of queries are added
            to them; fp32 tensors keep the sum over chunks unrounded.

    Returns:
        The gradient of q.

    The terms added to ``grad_k`` and ``grad_v`` are not rounded to the dtype of ``k`` before.
    """
    groups = k.shape[2]
    highest, total = statistics
    weights = _scores(q, k, causal, scale, pieces).sub_(highest).exp_().div_(total)
    grad_out = _fold(grad, groups)
    # The softmax's backward subtracts the row sum of weight times gradient.
    common = (grad_out * _fold(out, groups)).sum(-1, keepdim=True)
    change = (grad_out @ _fold(v, groups).mT).sub_(common).mul_(weights).mul_(_scale(q, scale))
    grad_q = _unfold(change @ _fold(k, groups), q)
    grad_k.add_((change.mT @ _fold(q, groups)).permute(2, 0, 1, 3))
    grad_v.add_((weights.mT @ grad_out).permute(2, 0, 1, 3))
    return grad_q


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check queries, keys and values for :func:`attention_forward`.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != v.shape or (q.shape[1], q.shape[3]) != (k.shape[1], k.shape[3]):
        raise ValueError(
            f"attention: {shapes} do not fit; they have to be [Sq, B, A, D], [Sk, B, G, D] and "
            "[Sk, B, G, D]"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads; "
            "repeat the key heads"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(
            f"attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; cast them to one dtype"
        )


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _fold(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[S, B, A, D]`` to ``[B, G, A/G * S, D]``, at least fp32: one GEMM for each key head."""
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
    pieces: Sequence[AttentionPiece] | None,
) -> torch.Tensor:
    """Scores ``[B, G, A/G * Sq, Sk]``, ``-inf`` where a query does not see a key."""
    groups = k.shape[2]
    queries = q.shape[0]
    keys = k.shape[0]
    scores = (_fold(q, groups) @ _fold(k, groups).mT).mul_(_scale(q, scale))
    per_head = scores.unflatten(2, (q.shape[2] // groups, queries))
    if pieces is not None:
        per_head.masked_fill_(_outside(pieces, q, keys).unsqueeze(1), -torch.inf)
    elif causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        per_head.masked_fill_(mask.triu_(keys - queries + 1), -torch.inf)
    return scores


def _outside(pieces: Sequence[AttentionPiece], q: torch.Tensor, keys: int) -> torch.Tensor:
    """``[B, 1, Sq, Sk]``, True where no piece lets a query see a key."""
    hidden = torch.ones(q.shape[1], 1, q.shape[0], keys, dtype=torch.bool, device=q.device)
    for sample, rows, columns in pieces:
        piece = hidden[sample, 0, rows, columns]
        piece.triu_(piece.shape[1] - piece.shape[0] + 1)
    return hidden
