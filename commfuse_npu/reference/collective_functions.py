"""The plain collectives of sequence parallelism as differentiable functions.

Each is the adjoint of another: gather and reduce-scatter of each other, the all-reduce of a
row-parallel layer of the identity, the all-to-all of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.runtime.collectives import (
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
    sum_rows_in_order,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective",
    "reduce_scatter",
    "reduce_scatter_in",
]

_Rows = Callable[[torch.Tensor], torch.Tensor]
"""What a collective makes of a rank's rows."""


def reduce_scatter_in(
    full: torch.Tensor,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None,
    sources: Sequence[int] | None = None,
) -> torch.Tensor:
    """:func:`reduce_scatter` without a backward: added in ``dtype`` if given, and rounded once."""
    wide = full.to(dtype or full.dtype)
    if sources is None:
        return reduce_scatter_rows(wide, group).to(full.dtype)
    return sum_rows_in_order(wide, group, sources).to(full.dtype)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: _Rows, back: _Rows) -> torch.Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def collective(x: torch.Tensor, forth: _Rows, back: _Rows) -> torch.Tensor:
    """``forth(x)``; the gradient of x is ``back`` of that of the result."""
    result: torch.Tensor = _Collective.apply(x, forth, back)
    return result


def all_gather(
    shard: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``[s, ...] -> [n * s, ...]``; backward is a reduce-scatter, in ``dtype`` if given."""
    forth = partial(all_gather_rows, group=group)
    return collective(shard, forth, partial(reduce_scatter_in, group=group, dtype=dtype))


def reduce_scatter(
    full: torch.Tensor,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
    sources: Sequence[int] | None = None,
) -> torch.Tensor:
    """``[n * s, ...] -> [s, ...]``, added in ``dtype`` if given; backward is an all-gather.

    Args:
        sources: the order in which the ranks' partials are added; the collective's by default.
    """
    forth = partial(reduce_scatter_in, group=group, dtype=dtype, sources=sources)
    return collective(full, forth, partial(all_gather_rows, group=group))


def all_reduce(
    full: torch.Tensor,
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
    parts: Sequence[slice] = (),
) -> torch.Tensor:
    """Sum over the group, added in ``dtype`` if given; backward passes the gradient through.

    Args:
        parts: leading runs of rows, one after the other, that are reduce-scattered and gathered
            instead, which fixes the order of additions where an all-reduce has one of its own.
    """

    def forth(full: torch.Tensor) -> torch.Tensor:
        total = full.to(dtype or full.dtype, copy=True)
        for part in parts:
            sums = reduce_scatter_rows(total[part], group)
            total[part] = all_gather_rows(sums.to(full.dtype), group).to(total.dtype)
        rest = total[max((part.stop for part in parts), default=0) :]
        if len(rest):
            dist.all_reduce(rest, group=group)
        return total.to(full.dtype)

    return collective(full, forth, lambda grad: grad)


def all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[n * s, ...]``: block d goes to rank d; backward sends the gradients back the same way."""
    swap = partial(all_to_all_rows, group=group)
    return collective(blocks, swap, swap)
