"""A linear layer whose GEMMs run over given runs of rows: the arithmetic of a fused op, unfused.

A GEMM library may choose another kernel for fewer rows and then rounds differently.  To tell that
from an error of the pipeline, the plain form of a fused op runs the very GEMMs of its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.saved_weight import SavedWeight
from commfuse_npu.ops.weight_gradient import WeightGradient

__all__ = ["blocked_linear"]


def blocked_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rows: Sequence[slice] | None = None,
    dgrad_rows: Sequence[slice] | None = None,
    wgrad_rows: Sequence[slice] | None = None,
    main_grad: bool = False,
) -> torch.Tensor:
    """``x @ weight^T + bias``, differentiable, one GEMM per run of rows.

    Equals ``torch.nn.functional.linear`` but for rounding.

    Args:
        x: ``[S, I]`` or ``[S, B, I]``.
        weight: ``[O, I]``, the dtype of ``x``.
        bias: ``[O]``.
        rows: runs of ``S * B`` rows for the forward, in order; all at once by default.
        dgrad_rows: the same for the gradient of ``x``.
        wgrad_rows: the same for the gradient of ``weight``, summed in fp32 in this order.
        main_grad: see :class:`WeightGradient`.

    Returns:
        ``[S, O]`` or ``[S, B, O]``.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = _BlockedLinear.apply(flat, weight, bias, rows, dgrad_rows, wgrad_rows, main_grad)
    return out.view(*x.shape[:-1], weight.shape[0])


def _by_rows(a: torch.Tensor, b: torch.Tensor, rows: Sequence[slice] | None) -> torch.Tensor:
    out = a.new_empty((a.shape[0], b.shape[1]))
    for run in rows if rows is not None else [slice(None)]:
        gemm_into(out[run], a[run], b)
    return out


class _BlockedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Sequence[slice] | None,
        dgrad_rows: Sequence[slice] | None,
        wgrad_rows: Sequence[slice] | None,
        main_grad: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.settings = dgrad_rows, wgrad_rows, main_grad
        out = _by_rows(x, weight.t(), rows)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dgrad_rows, wgrad_rows, main_grad = ctx.settings
        (x,) = ctx.saved_tensors
        weight = ctx.weight.get("blocked_linear")
        grad = grad.contiguous()
        grad_x = _by_rows(grad, weight, dgrad_rows) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            blocks = wgrad_rows is not None
            gradient = WeightGradient(weight, main_grad=main_grad, blocks=blocks)
            for run in wgrad_rows or [slice(None)]:
                gradient.add(grad[run], x[run])
            grad_weight = gradient.result()
        grad_bias = grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None
