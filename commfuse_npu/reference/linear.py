"""Tensor-parallel linear layers over the collectives of torch.distributed.

Legend: as in :mod:`commfuse_npu.ops.linear`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.layers.linear_arguments import autocast, check_divisible, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan.rules import gather_pieces, parts_of, scatter_pieces
from commfuse_npu.plan.schedule import Place
from commfuse_npu.reference.blocked_linear import blocked_linear
from commfuse_npu.reference.collective_functions import all_gather, all_reduce, reduce_scatter
from commfuse_npu.reference.place import place_in

__all__ = ["plain_all_gather_linear", "plain_linear_all_reduce", "plain_linear_reduce_scatter"]


def plain_all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.linear.all_gather_linear`."""
    x, weight, bias = autocast(x, weight, bias)
    pieces: dict[str, Any] = {}
    if same_gemms and group.size() > 1:
        place, rows = place_in(group, options.schedule), rows_of(x)
        everything = (slice(0, rows * place.size),)
        pieces["forward"] = [(runs, None) for runs in gather_pieces(place, rows)]
        if not options.by_collectives(weight.shape[0]):
            pieces["dgrad"] = [
                (everything, columns) for columns in place.schedule.runs(weight.shape[1], "last")
            ]
    whole = all_gather(x, group, options.reduce_dtype)
    return blocked_linear(whole, weight, bias, main_grad=options.main_grad, **pieces)


def plain_linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.linear.linear_reduce_scatter`."""
    check_divisible("plain_linear_reduce_scatter", x, group.size())
    x, weight, bias = autocast(x, weight, bias)
    pieces: dict[str, Any] = {}
    if same_gemms and group.size() > 1:
        place, rows = place_in(group, options.schedule), rows_of(x) // group.size()
        made = scatter_pieces(place, rows, weight.shape[0])
        pieces["forward"] = [((run,), columns) for run, columns in made]
        used = gather_pieces(place, rows)
        pieces["dgrad"] = [(runs, None) for runs in used]
        if options.wgrad == "blocks":
            pieces["wgrad"] = used
    full = blocked_linear(x, weight, main_grad=options.main_grad, **pieces)
    y = reduce_scatter(full, group, options.reduce_dtype)
    return y if bias is None else y + bias


def plain_linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.linear.linear_all_reduce`.

    Args:
        same_gemms: cut the GEMM into the pieces of the fused op's program, and sum by
            reduce-scatter and all-gather: with more than two ranks an all-reduce has an order of
            additions of its own.
    """
    x, weight, bias = autocast(x, weight, bias)
    rows, size = rows_of(x), group.size()
    pieces: dict[str, Any] = {}
    parts: list[slice] = []
    if same_gemms and 1 < size <= rows:
        place, rest = place_in(group, options.schedule), rows % size
        parts = parts_of(place, rows - rest)
        made = [(part, None) for part in parts[:-1]] + [
            (slice(parts[-1].start + run.start, parts[-1].start + run.stop), None)
            for run, _ in scatter_pieces(_whole(place), len(range(rows)[parts[-1]]) // size, 1)
        ]
        if rest:
            made.append((slice(rows - rest, rows), None))
        pieces["forward"] = [((run,), columns) for run, columns in made]
    full = blocked_linear(x, weight, main_grad=options.main_grad, **pieces)
    flat = all_reduce(full.view(rows, weight.shape[0]), group, options.reduce_dtype, parts)
    y = flat.view(full.shape)
    return y if bias is None else y + bias


def _whole(place: Place) -> Place:
    return place._replace(schedule=replace(place.schedule, chunks=1))
