"""Linear layers into and out of head groups, and the exchange of the heads, run by run.

A fused op and its plain form are the same lines here; what differs is how their blocks travel, an
:class:`Exchange`.  Legend: as in :mod:`commfuse_npu.layers.head_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.head_linear import HeadRows, LinearOfHeads, LinearToHeads
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.runtime.executor import Work

__all__ = ["Exchange", "LinearOfHeadsExchanged", "LinearToHeadsExchanged", "Swap"]


class Swap(Protocol):
    """An all-to-all of blocks ``[n, columns]`` that are made, or used, piece by piece.

    Works and tensors are those of :func:`~commfuse_npu.plan.rules.blocks.exchange`: ``make`` unless
    ``blocks`` are given, ``use``, ``wgrad``; ``blocks`` and ``received``, ``[N * n, columns]``.

    Args:
        rows: ``n``.
        like: of the dtype and on the device of the blocks.
        backward: whether it is the backward of its op.
    """

    def __call__(
        self,
        rows: int,
        columns: int,
        like: torch.Tensor,
        works: Mapping[str, Work],
        *,
        backward: bool = False,
        **tensors: Any,
    ) -> None: ...


@dataclass(frozen=True)
class Exchange:
    """How the blocks of one call travel; forward and backward have the same.

    Attributes:
        name: of the op, for errors.
        size: ``N``.
    """

    name: str
    size: int
    options: LinearOptions
    swap: Swap


class LinearToHeadsExchanged(torch.autograd.Function):
    """``all_to_all(x @ W_g^T + b_g of every head group g)``, one GEMM per run of rows.

    ``x`` ``[n, H]``, ``weight`` ``[R, H]``, ``bias`` ``[R]``, to ``[N * n, O]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        heads: HeadRows,
        exchange: Exchange,
    ) -> torch.Tensor:
        x, rows, features = x.contiguous(), x.shape[0], heads.features
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.call = heads, exchange
        linear = LinearToHeads(weight, heads, rows)
        y = x.new_empty((rows * exchange.size, features))
        exchange.swap(rows, features, y, {"make": partial(linear.forward, x, bias)}, received=y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads, exchange = ctx.call
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        rows = grad.shape[0] // exchange.size
        linear = LinearToHeads(ctx.weight.get(exchange.name), heads, rows)
        linear.begin_backward(x, ctx.needs_input_grad[:3], exchange.options)
        tensors = {"blocks": grad}
        if linear.needs_whole:
            tensors["received"] = torch.empty_like(grad)
        works = {"use": linear.backward}
        exchange.swap(rows, heads.features, grad, works, backward=True, **tensors)
        return *linear.gradients(tensors.get("received")), None, None


class LinearOfHeadsExchanged(torch.autograd.Function):
    """``sum of x_g @ W_g^T + bias`` over ``x_g`` of ``all_to_all(x)``, one GEMM per run of rows.

    ``x`` ``[N * n, F]``, ``weight`` ``[H, N * F]``, ``bias`` ``[H]``, to ``[n, H]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange,
    ) -> torch.Tensor:
        rows = x.shape[0] // exchange.size
        tensors: dict[str, Any] = {"blocks": x.contiguous()}
        if ctx.needs_input_grad[1]:
            tensors["received"] = x.new_empty(x.shape)
        ctx.save_for_backward(tensors.get("received"))
        ctx.weight = SavedWeight(weight)
        ctx.exchange = exchange
        linear = LinearOfHeads(weight, exchange.size, rows)
        linear.begin_forward(bias)
        exchange.swap(rows, x.shape[1], x, {"use": linear.forward}, **tensors)
        return linear.output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        (received,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        weight = ctx.weight.get(exchange.name)
        rows, features = grad.shape[0], weight.shape[1] // exchange.size
        linear = LinearOfHeads(weight, exchange.size, rows)
        linear.begin_backward(grad, needs_weight, exchange.options)
        works: dict[str, Work] = {"make": linear.backward}
        if needs_weight:
            works["wgrad"] = partial(linear.add_weight_gradient, received)
        grad_x = None
        if needs_x:
            grad_x = grad.new_empty((rows * exchange.size, features))
            exchange.swap(rows, features, grad, works, backward=True, received=grad_x)
        elif needs_weight:
            works["wgrad"]()
        return grad_x, linear.weight_gradient(), grad.sum(0) if needs_bias else None, None
