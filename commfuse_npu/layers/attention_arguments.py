"""What layers with self-attention ask of their arguments."""

from __future__ import annotations

import torch

from commfuse_npu.kernels.attention_arguments import check_attention

__all__ = ["check_self_attention"]


def check_self_attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> None:
    """``q`` is ``[S, B, A, D]``, ``k`` and ``v`` are ``[S, B, G, D]``, and there is no dropout.

    Raises:
        TypeError: they are not floating-point numbers.
        ValueError: shapes or dtypes do not fit each other, or dropout is asked for.
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
