"""What the attention kernels of all devices ask of their arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Piece", "check_attention", "check_hidden", "check_sums"]


class Piece(NamedTuple):
    """Queries of one document in one sample of a batch, and the keys of it that they see.

    The keys begin with the document and end with the last of the queries.  A query sees those up to
    its own position: causal, both counted from their ends.

    Attributes:
        sample: of the batch.
        queries, keys: rows of what a kernel is given; not empty.
    """

    sample: int
    queries: slice
    keys: slice


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
    """``q`` is ``[Sq, B, A, D]``, ``k`` and ``v`` are ``[Sk, B, G, D]``.

    Raises:
        ValueError: they are not, or a causal query would see no key.
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
    if causal and q.shape[0] > k.shape[0]:
        raise ValueError(
            f"attention: {q.shape[0]} causal queries end with the last of {k.shape[0]} keys, so "
            f"the first {q.shape[0] - k.shape[0]} see none; pass the keys up to the last query"
        )


def check_hidden(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None) -> None:
    """``hidden`` is ``[B, 1, Sq, Sk]`` or ``[1, 1, Sq, Sk]``, bool, if it is given.

    Raises:
        ValueError: it is not.
    """
    if hidden is None:
        return
    one, whole = ((batch, 1, q.shape[0], k.shape[0]) for batch in (1, q.shape[1]))
    if hidden.dtype != torch.bool or hidden.shape not in (one, whole):
        raise ValueError(
            f"attention: the mask is {hidden.dtype} {tuple(hidden.shape)}; it has to be torch.bool "
            f"{whole} or {one}, True where a query does not see a key"
        )


def check_sums(k: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor) -> None:
    """``grad_k`` and ``grad_v`` have the shape of ``k``.

    Raises:
        ValueError: they have not.
    """
    if grad_k.shape != k.shape or grad_v.shape != k.shape:
        raise ValueError(
            f"attention: grad_k {tuple(grad_k.shape)} and grad_v {tuple(grad_v.shape)} have to be "
            f"{tuple(k.shape)}, like k; pass the rows of the keys that were used"
        )
