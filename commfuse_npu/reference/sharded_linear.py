"""A fully sharded linear layer over the collectives of torch.distributed.

Legend: as in :mod:`commfuse_npu.ops.sharded_linear`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.linear_arguments import autocast
from commfuse_npu.layers.options import ShardedOptions
from commfuse_npu.layers.sharded_blocks import InputGradient, columns_into, wgrad_into
from commfuse_npu.plan.rules import made_pieces, used_pieces
from commfuse_npu.reference.collective_functions import collective
from commfuse_npu.reference.place import place_in, sources_of
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows, sum_rows_in_order

__all__ = ["plain_sharded_linear"]


def plain_sharded_linear(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: ShardedOptions = ShardedOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.sharded_linear.sharded_linear`.

    The whole weight is kept for the backward instead of being gathered again.

    Args:
        same_blocks: cut the GEMMs into the blocks of the fused op's program, and add in its order.
    """
    x, shard, bias = autocast(x, weight_shard, bias)
    gather = partial(all_gather_rows, group=group)
    place, rows = place_in(group, options.schedule), shard.shape[0]
    by_blocks = same_blocks and place.size > 1 and rows > 0
    sources = sources_of(place) if by_blocks else None
    add_up = partial(_summed, group=group, options=options, sources=sources)
    whole = collective(shard, gather, add_up)
    if not by_blocks:
        return torch.nn.functional.linear(x, whole, bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y = _LinearInBlocks.apply(flat, whole, bias, used_pieces(place, rows), made_pieces(place, rows))
    return y.view(*x.shape[:-1], y.shape[1])


def _summed(
    grad: torch.Tensor, group: dist.ProcessGroup, options: ShardedOptions, sources: list[int] | None
) -> torch.Tensor:
    """The gradient of a shard: summed over the group, and divided before it is rounded."""
    wide = grad.to(options.reduce_dtype or grad.dtype)
    if sources is None:
        total = reduce_scatter_rows(wide, group)
    else:
        total = sum_rows_in_order(wide, group, sources)
    return (total.div_(group.size()) if options.average else total).to(grad.dtype)


class _LinearInBlocks(torch.autograd.Function):
    """``linear(x, weight, bias)`` by the GEMMs of the fused op."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        runs: list[slice],
        wgrad_runs: list[slice],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.runs = runs, wgrad_runs
        y = x.new_empty((x.shape[0], weight.shape[0]))
        for run in runs:
            columns_into(y, x, weight[run], bias, run)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        runs, wgrad_runs = ctx.runs
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if needs_weight:
            grad_weight = torch.empty_like(weight)
            for run in wgrad_runs:
                wgrad_into(grad_weight[run], grad, x, run)
        if needs_x:
            total = InputGradient(grad, weight.shape[1])
            for run in runs:
                total.add(weight[run], run)
            grad_x = total.result()
        grad_bias = grad.sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None
