"""The formulas of the ops: torch's autograd over plain collectives.

The formulas are independent of the rules, pieces and orders of the product.  Sums of integers are
exact in any order, so the fused linear ops have to give the same bits.  In fp64 the formulas are
the reference for rounded results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from commfuse_npu.ops import LinearOptions
from tests.attention_masks import attention

Group = dist.ProcessGroup


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: Callable, back: Callable) -> torch.Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def _gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group)
    return torch.cat(parts)


def _blocks(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    rows = x.shape[0] // group.size()
    return [x[rank * rows : (rank + 1) * rows] for rank in range(group.size())]


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.double()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def _scatter(x: torch.Tensor, group: Group, divisor: int = 1) -> torch.Tensor:
    total = x.double()
    dist.all_reduce(total, group=group)
    return (_blocks(total, group)[group.rank()] / divisor).to(x.dtype)


def _swap(x: torch.Tensor, group: Group) -> torch.Tensor:
    inputs = _blocks(_gather(x, group), group)
    return torch.cat([_blocks(tensor, group)[group.rank()] for tensor in inputs])


def _by(group: Group, x: torch.Tensor, forth: Callable, back: Callable) -> torch.Tensor:
    return _Collective.apply(x, partial(forth, group=group), partial(back, group=group))


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
    return linear(_by(group, x, _gather, _scatter), _weight(weight, options), bias)


def linear_reduce_scatter(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = _by(group, linear(x, _weight(weight, options)), _scatter, _gather)
    return y if bias is None else y + bias


def linear_all_reduce(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = _by(group, linear(x, _weight(weight, options)), _sum, lambda grad, group: grad)
    return y if bias is None else y + bias


def linear_all_to_all(x, weight, bias=None, *, group: Group, options: LinearOptions):
    parts = linear(x, _weight(weight, options), bias).chunk(group.size(), -1)
    return _by(group, torch.cat(parts), _swap, _swap)


def all_to_all_linear(x, weight, bias=None, *, group: Group, options: LinearOptions):
    heads = torch.cat(_blocks(_by(group, x, _swap, _swap), group), -1)
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
    return torch.cat(_blocks(_by(group, attended, _swap, _swap), group), -1)


def sharded_linear(x, weight_shard, bias=None, *, group: Group, options: LinearOptions):
    average = partial(_scatter, divisor=group.size())
    return linear(x, _by(group, weight_shard, _gather, average), bias)
