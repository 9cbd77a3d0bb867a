"""The formulas of the ops: collectives of torch.distributed, and one GEMM over all rows.

The formulas are independent of the rules, pieces and orders of the product.  Sums of integers are
exact in any order, so all fused linear ops have to give the same bits.  The ops in
:data:`tests.random_networks.case.BITS_OF_TORCH` have to do so for rounded values, too.  In fp64 the
formulas are the reference for rounded results.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

from commfuse_npu.ops import LinearOptions
from tests.attention_masks import attention

Group = dist.ProcessGroup


def _gather(x: torch.Tensor, group: Group, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The backward sums in ``dtype``."""
    wide = x.contiguous().to(dtype or x.dtype)
    return collectives.all_gather_tensor_autograd(wide, 0, group).to(x.dtype)


def _scatter(x: torch.Tensor, group: Group, dtype: torch.dtype | None = None) -> torch.Tensor:
    wide = x.contiguous().to(dtype or x.dtype)
    return collectives.reduce_scatter_tensor_autograd(wide, "sum", 0, group).to(x.dtype)


def _swap(x: torch.Tensor, group: Group) -> torch.Tensor:
    return collectives.all_to_all_single_autograd(x.contiguous(), None, None, group)


class _Linear(torch.autograd.Function):
    """``x @ weight^T + bias``; each product is rounded once, and then the bias is added.

    With ``main_grad`` that attribute of the weight takes the gradient, as in Megatron.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, main_grad: bool) -> torch.Tensor:
        ctx.x, ctx.weight, ctx.main_grad = x, weight, main_grad
        y: torch.Tensor = (x.double() @ weight.t().double()).to(x.dtype)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, grad, needs = ctx.weight, grad.contiguous(), ctx.needs_input_grad
        grad_x = (grad.double() @ weight.double()).to(grad.dtype)
        grad_bias = grad.flatten(0, -2).sum(0) if needs[2] else None
        factors = grad.flatten(0, -2).t(), ctx.x.flatten(0, -2)
        if not (ctx.main_grad and needs[1]):
            return grad_x, factors[0] @ factors[1], grad_bias, None
        total = weight.main_grad
        wide = torch.promote_types(total.dtype, torch.float32)
        total.copy_(torch.addmm(*(tensor.to(wide) for tensor in (total, *factors))))
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad_x, None, grad_bias, None
        weight.grad_added_to_main_grad = True
        return grad_x, torch.zeros_like(weight), grad_bias, None


def linear(x: Any, weight: Any, bias: Any, options: LinearOptions) -> Any:
    return _Linear.apply(x.contiguous(), weight, bias, options.main_grad)


def all_gather_linear(x, weight, bias=None, *, group: Group, options: LinearOptions):
    return linear(_gather(x, group, options.reduce_dtype), weight, bias, options)


def linear_reduce_scatter(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = _scatter(linear(x, weight, None, options), group, options.reduce_dtype)
    return y if bias is None else y + bias


def linear_all_reduce(x, weight, bias=None, *, group: Group, options: LinearOptions):
    y = linear(x, weight, None, options)
    total = y.detach().clone()
    dist.all_reduce(total, group=group)
    y = y + (total - y).detach()
    return y if bias is None else y + bias


def linear_all_to_all(x, weight, bias=None, *, group: Group, options: LinearOptions):
    parts = linear(x, weight, bias, options).chunk(group.size(), -1)
    return _swap(torch.cat(parts), group)


def all_to_all_linear(x, weight, bias=None, *, group: Group, options: LinearOptions):
    heads = torch.cat(_swap(x, group).chunk(group.size()), -1)
    return linear(heads, weight, bias, options)


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
