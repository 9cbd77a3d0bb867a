"""What the attention kernels of all devices ask of their arguments."""

from __future__ import annotations

import torch

__all__ = ["check_attention", "check_sums"]


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
