"""A linear layer whose GEMMs run over given pieces: the arithmetic of a fused op, unfused.

A GEMM library may choose another kernel for fewer rows and then rounds differently.  To tell that
from an error of the op, the plain form of a fused op runs the very GEMMs of its program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.layers.weight_gradient import WeightGradient

__all__ = ["Piece", "blocked_linear"]

Piece = tuple[Sequence[slice], slice | None]
"""Runs of rows that one GEMM takes together, and the columns of the result that it makes."""


def blocked_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    forward: Sequence[Piece] | None = None,
    dgrad: Sequence[Piece] | None = None,
    wgrad: Sequence[Sequence[slice]] | None = None,
    main_grad: bool = False,
) -> torch.Tensor:
    """``x @ weight^T + bias``, differentiable, one GEMM per piece.

    Equals ``torch.nn.functional.linear`` but for rounding.

    Args:
        x: ``[S, I]`` or ``[S, B, I]``.
        weight: ``[O, I]``, the dtype of ``x``.
        bias: ``[O]``.
        forward: pieces of the ``S * B`` rows for the forward, in order; all at once by default.
        dgrad: the same for the gradient of ``x``.
        wgrad: the same runs of rows for the gradient of ``weight``, summed in fp32 in this order.
        main_grad: see :class:`~commfuse_npu.layers.weight_gradient.WeightGradient`.

    Returns:
        ``[S, O]`` or ``[S, B, O]``.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = _BlockedLinear.apply(flat, weight, bias, forward, dgrad, wgrad, main_grad)
    return out.view(*x.shape[:-1], weight.shape[0])


def _by_pieces(a: torch.Tensor, b: torch.Tensor, pieces: Sequence[Piece] | None) -> torch.Tensor:
    out = a.new_empty((a.shape[0], b.shape[1]))
    for runs, columns in pieces if pieces is not None else [([slice(0, a.shape[0])], None)]:
        columns = columns or slice(0, b.shape[1])
        rows = _rows(a, runs)
        made = a.new_empty((rows.shape[0], columns.stop - columns.start))
        gemm_into(made, rows, b[:, columns])
        for run, part in zip(runs, made.split([run.stop - run.start for run in runs]), strict=True):
            out[run, columns] = part
    return out


def _rows(a: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    return a[runs[0]] if len(runs) == 1 else torch.cat([a[run] for run in runs])


class _BlockedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pieces: Sequence[Piece] | None,
        dgrad: Sequence[Piece] | None,
        wgrad: Sequence[Sequence[slice]] | None,
        main_grad: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.settings = dgrad, wgrad, main_grad
        out = _by_pieces(x, weight.t(), pieces)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dgrad, wgrad, main_grad = ctx.settings
        (x,) = ctx.saved_tensors
        weight = ctx.weight.get("blocked_linear")
        grad = grad.contiguous()
        grad_x = _by_pieces(grad, weight, dgrad) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            gradient = WeightGradient(weight, main_grad=main_grad, blocks=wgrad is not None)
            for runs in wgrad or [[slice(None)]]:
                gradient.add(_rows(grad, runs), _rows(x, runs))
            grad_weight = gradient.result()
        grad_bias = grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None
