"""Linear layers into and out of head groups over given runs: the arithmetic of a fused op, unfused.

Legend: as in :mod:`commfuse_npu.layers.head_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.head_linear import HeadRows, LinearOfHeads, LinearToHeads
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight

__all__ = ["blocked_linear_of_heads", "blocked_linear_to_heads"]


def blocked_linear_to_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: HeadRows,
    *,
    rows: Sequence[slice],
    grad_rows: Sequence[slice],
    options: LinearOptions,
) -> torch.Tensor:
    """``x @ W_g^T + b_g`` of every head group, differentiable, one GEMM per run of rows.

    Equals ``heads.columns(linear(x, weight, bias))`` but for rounding.

    Args:
        x: ``[n, H]``.
        weight: ``[R, H]``, the dtype of ``x``.
        bias: ``[R]``.
        rows: runs of the ``N * n`` rows for the forward, in order.
        grad_rows: the same for the backward.

    Returns:
        ``[N * n, O]``.
    """
    out: torch.Tensor = _BlockedLinearToHeads.apply(
        x.contiguous(), weight, bias, heads, rows, grad_rows, options
    )
    return out


class _BlockedLinearToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        heads: HeadRows,
        rows: Sequence[slice],
        grad_rows: Sequence[slice],
        options: LinearOptions,
    ) -> torch.Tensor:
        linear = LinearToHeads(weight, heads, x.shape[0])
        out = x.new_empty((len(heads.bounds) * x.shape[0], heads.features))
        for run in rows:
            linear.forward(x, bias, out[run], run)
        ctx.save_for_backward(x)
        ctx.weight = SavedWeight(weight)
        ctx.settings = heads, grad_rows, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        heads, grad_rows, options = ctx.settings
        linear = LinearToHeads(ctx.weight.get("blocked_linear_to_heads"), heads, x.shape[0])
        linear.begin_backward(x, ctx.needs_input_grad[:3], options)
        grad = grad.contiguous()
        for run in grad_rows:
            linear.backward(grad[run], run)
        return *linear.gradients(grad), None, None, None, None


def blocked_linear_of_heads(
    whole: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: int,
    *,
    rows: Sequence[slice],
    grad_rows: Sequence[slice],
    options: LinearOptions,
) -> torch.Tensor:
    """``sum of x_g @ W_g^T + bias``, differentiable, one GEMM per run of rows.

    Equals ``linear(beside(whole, size), weight, bias)`` but for rounding.

    Args:
        whole: ``[N * n, F]``.
        weight: ``[H, N * F]``, the dtype of ``whole``.
        bias: ``[H]``.
        size: ``N``.
        rows: runs of the ``N * n`` rows for the forward, in order.
        grad_rows: the same for the gradient of ``whole``.

    Returns:
        ``[n, H]``.
    """
    out: torch.Tensor = _BlockedLinearOfHeads.apply(
        whole.contiguous(), weight, bias, size, rows, grad_rows, options
    )
    return out


class _BlockedLinearOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        size: int,
        rows: Sequence[slice],
        grad_rows: Sequence[slice],
        options: LinearOptions,
    ) -> torch.Tensor:
        linear = LinearOfHeads(weight, size, whole.shape[0] // size)
        linear.begin_forward(bias)
        for run in rows:
            linear.forward(whole[run], run)
        ctx.save_for_backward(whole)
        ctx.weight = SavedWeight(weight)
        ctx.settings = size, grad_rows, options
        return linear.output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (whole,) = ctx.saved_tensors
        size, grad_rows, options = ctx.settings
        needs_whole, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        linear = LinearOfHeads(ctx.weight.get("blocked_linear_of_heads"), size, grad.shape[0])
        linear.begin_backward(grad, needs_weight, options)
        grad_whole = None
        if needs_whole:
            grad_whole = torch.empty_like(whole)
            for run in grad_rows:
                linear.backward(grad_whole[run], run)
        linear.add_weight_gradient(whole)
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_whole, linear.weight_gradient(), grad_bias, None, None, None, None
