"""The formulas of the ops: torch's autograd over plain collectives.

The formulas are independent of the rules, pieces and orders of the product.  Sums of integers are
exact in any order, so the fused linear ops have to give the same bits.  In fp64 the formulas are
the reference for rounded results.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.nn.functional import linear

from commfuse_npu.ops import LinearOptions
from tests.attention_masks import attention

Group = dist.ProcessGroup


def _gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    return collectives.all_gather_tensor_autograd(x.contiguous(), 0, group)


def _scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    return collectives.reduce_scatter_tensor_autograd(x.contiguous(), "sum", 0, group)


def _swap(x: torch.Tensor, group: Group) -> torch.Tensor:
    return collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)


class _IntoMainGrad(torch.autograd.Function):
    """A weight whose gradient is added to ``main_grad``, as by Megatron's fused accumulation."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:
        ctx.weight.main_grad.add_(grad)
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return None
        ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(grad)


def _weight(weight: torch.Tensor, options: LinearOptions) -> torch.Tensor:
    return _IntoMainGrad.apply(weight) if options.main_grad else weight


def all_gather_linear(x, weight, bias=None, *, group: Group, options: LinearOptions):
    return linear(_gather(x, group), _weight(weight, options), bias)


def linear_reduce_scatter(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = _scatter(linear(x, _weight(weight, options)), group)
    return y if bias is None else y + bias


def linear_all_reduce(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = linear(x, _weight(weight, options))
    total = y.detach().clone()
    dist.all_reduce(total, group=group)
    y = y + (total - y).detach()
    return y if bias is None else y + bias


def linear_all_to_all(x, weight, bias=None, *, group: Group, options: LinearOptions):
    parts = linear(x, _weight(weight, options), bias).chunk(group.size(), -1)
    return _swap(torch.cat(parts), group)


def all_to_all_linear(x, weight, bias=None, *, group: Group, options: LinearOptions):
    heads = torch.cat(_swap(x, group).chunk(group.size()), -1)
    return linear(heads, _weight(weight, options), bias)


def attention_linear_reduce_scatter(
    q, k, v, weight, bias=None, *, group: Group, options: LinearOptions, shown, scale
):
    attended = attention(q, k, v, shown, scale).flatten(2)
    return linear_reduce_scatter(attended, weight, bias, group=group, options=options)


def attention_all_to_all(
    q, k, v, weight=None, bias=None, *, group: Group, options: LinearOptions, shown, scale
):
    attended = attention(q, k, v, shown, scale).flatten(2)
    if weight is not None:
        return all_to_all_linear(attended, weight, bias, group=group, options=options)
    return torch.cat(_swap(attended, group).chunk(group.size()), -1)
