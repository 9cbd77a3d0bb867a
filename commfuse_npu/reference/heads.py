"""The exchanges of heads and the attention of Ulysses over the all-to-all of torch.distributed.

Legend: as in :mod:`commfuse_npu.ops.head_exchange` and :mod:`commfuse_npu.ops.ulysses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.layers.attention_mask import AttentionMask
from commfuse_npu.layers.attention_options import check_self_attention, options_for_attention
from commfuse_npu.layers.differentiable import differentiable
from commfuse_npu.layers.documents import Documents
from commfuse_npu.layers.exchanged_attention import AttentionExchanged, AttentionLinearExchanged
from commfuse_npu.layers.exchanged_linear import (
    Exchange,
    LinearOfHeadsExchanged,
    LinearToHeadsExchanged,
)
from commfuse_npu.layers.head_linear import HeadRows, beside
from commfuse_npu.layers.linear_arguments import autocast, check_sequence, compute_dtype
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan import Place, Schedule
from commfuse_npu.plan.rules import made_pieces, swapped_pieces
from commfuse_npu.reference.blocked_attention import blocked_attention
from commfuse_npu.reference.blocked_linear import blocked_linear
from commfuse_npu.reference.collective_functions import all_to_all
from commfuse_npu.reference.place import place_in
from commfuse_npu.runtime.collectives import all_to_all_rows
from commfuse_npu.runtime.executor import Work

__all__ = [
    "plain_all_to_all_linear",
    "plain_attention_all_to_all",
    "plain_attention_all_to_all_linear",
    "plain_linear_all_to_all",
]


def plain_linear_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    rows: Sequence[Sequence[slice]] | None = None,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.head_exchange.linear_all_to_all`."""
    name = "plain_linear_all_to_all"
    heads = HeadRows(name, weight.shape[0], group.size(), rows)
    x, weight, bias = autocast(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if same_blocks:
        exchange = _exchange(name, group, options, options.schedule)
        y = differentiable(LinearToHeadsExchanged, flat, weight, bias, heads, exchange)
    else:
        made = blocked_linear(flat, weight, bias, main_grad=options.main_grad)
        y = all_to_all(heads.columns(made), group)
    # No -1 for the rows: an empty tensor has no say in them.
    return y.view(x.shape[0] * group.size(), *x.shape[1:-1], heads.features)


def plain_all_to_all_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.head_exchange.all_to_all_linear`."""
    name = "plain_all_to_all_linear"
    check_sequence(name, x.shape[0], group.size())
    x, weight, bias = autocast(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if same_blocks:
        exchange = _exchange(name, group, options, options.schedule)
        y = differentiable(LinearOfHeadsExchanged, flat, weight, bias, exchange)
    else:
        joined = beside(all_to_all(flat, group), group.size())
        y = blocked_linear(joined, weight, bias, main_grad=options.main_grad)
    return y.view(x.shape[0] // group.size(), *x.shape[1:-1], weight.shape[0])


def plain_attention_all_to_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    hidden: torch.Tensor | None = None,
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.ulysses.attention_all_to_all`."""
    name = "plain_attention_all_to_all"
    check_self_attention(name, q, k, v, dropout)
    mask = AttentionMask(causal, documents, hidden).checked(name, q)
    check_sequence(name, q.shape[0], group.size())
    q, k, v = (head.to(compute_dtype(q)) for head in (q, k, v))
    size, block_rows = group.size(), q.shape[0] // group.size()
    if same_blocks:
        by_cost = options_for_attention(options, size, mask.costs_rise).schedule
        exchange = _exchange(name, group, options, by_cost)
        return differentiable(AttentionExchanged, q, k, v, mask, scale, exchange)
    attended = blocked_attention(q, k, v, **mask._asdict(), scale=scale)
    # As ``[S * B, A * D]``.
    joined = beside(all_to_all(attended.flatten(2).flatten(0, 1), group), size)
    return joined.view(block_rows, q.shape[1], joined.shape[1])


def plain_attention_all_to_all_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    hidden: torch.Tensor | None = None,
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.ulysses.attention_all_to_all_linear`."""
    name = "plain_attention_all_to_all_linear"
    check_self_attention(name, q, k, v, dropout)
    mask = AttentionMask(causal, documents, hidden).checked(name, q)
    check_sequence(name, q.shape[0], group.size())
    q, weight, bias = autocast(q, weight, bias)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if not same_blocks:
        attended = plain_attention_all_to_all(q, k, v, group=group, **mask._asdict(), scale=scale)
        return blocked_linear(attended, weight, bias, main_grad=options.main_grad)
    forth, back = (
        options_for_attention(options, group.size(), by_cost).schedule
        for by_cost in (mask.costs_rise, False)
    )
    exchange = _exchange(name, group, options, forth, back)
    arguments = q, k, v, weight, bias, mask, scale, exchange
    return differentiable(AttentionLinearExchanged, *arguments)


def _exchange(
    name: str,
    group: dist.ProcessGroup,
    options: LinearOptions,
    forth: Schedule,
    back: Schedule | None = None,
) -> Exchange:
    """Blocks travel by an all-to-all, between what is made and used as by these schedules."""
    places = place_in(group, forth), place_in(group, back or forth)
    return Exchange(name, group.size(), options, partial(_swap, group, places))


def _swap(
    group: dist.ProcessGroup,
    places: tuple[Place, Place],
    rows: int,
    columns: int,
    like: torch.Tensor,
    works: Mapping[str, Work],
    *,
    backward: bool = False,
    **tensors: Any,
) -> None:
    """The lines that :func:`~commfuse_npu.plan.rules.exchange` equals."""
    place = places[backward]
    blocks = tensors.get("blocks")
    if blocks is None:
        blocks = like.new_empty((group.size() * rows, columns))
    if "make" in works:
        for run in made_pieces(place, rows):
            works["make"](blocks[run], run)
    received = all_to_all_rows(blocks, group)
    if "received" in tensors:
        tensors["received"].copy_(received)
    if "wgrad" in works:
        works["wgrad"]()
    if "use" in works:
        for run in swapped_pieces(place, rows, "last" if "make" in works else "first"):
            works["use"](received[run], run)
