"""The exchanges of heads and the attention of Ulysses over the all-to-all of torch.distributed.

Legend: as in :mod:`commfuse_npu.ops.head_exchange` and :mod:`commfuse_npu.ops.ulysses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.layers.attention_options import check_self_attention, options_for_attention
from commfuse_npu.layers.attention_runs import run_of_gemm
from commfuse_npu.layers.head_linear import HeadRows, beside
from commfuse_npu.layers.linear_arguments import autocast, check_sequence, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan.rules import made_pieces, swapped_pieces, used_pieces
from commfuse_npu.reference.blocked_attention import blocked_attention
from commfuse_npu.reference.blocked_head_linear import (
    blocked_linear_of_heads,
    blocked_linear_to_heads,
)
from commfuse_npu.reference.blocked_linear import blocked_linear
from commfuse_npu.reference.collective_functions import all_to_all
from commfuse_npu.reference.place import place_in

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
    heads = HeadRows("plain_linear_all_to_all", weight.shape[0], group.size(), rows)
    x, weight, bias = autocast(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    if same_blocks:
        place = place_in(group, options.schedule)
        whole = blocked_linear_to_heads(
            flat, weight, bias, heads,
            rows=made_pieces(place, rows_of(x)),
            grad_rows=used_pieces(place, rows_of(x)),
            options=options,
        )  # fmt: skip
    else:
        made = blocked_linear(flat, weight, bias, main_grad=options.main_grad)
        whole = heads.columns(made)
    # No -1 for the rows: an empty tensor has no say in them.
    shape = x.shape[0] * group.size(), *x.shape[1:-1], heads.features
    return all_to_all(whole, group).view(shape)


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
    check_sequence("plain_all_to_all_linear", x.shape[0], group.size())
    x, weight, bias = autocast(x, weight, bias)
    whole = all_to_all(x.reshape(-1, x.shape[-1]), group)
    if same_blocks:
        place, rows = place_in(group, options.schedule), rows_of(x) // group.size()
        y = blocked_linear_of_heads(
            whole, weight, bias, group.size(),
            rows=used_pieces(place, rows),
            grad_rows=made_pieces(place, rows),
            options=options,
        )  # fmt: skip
    else:
        joined = beside(whole, group.size())
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
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.ulysses.attention_all_to_all`."""
    name = "plain_attention_all_to_all"
    check_self_attention(name, q, k, v, dropout)
    check_sequence(name, q.shape[0], group.size())
    size, block_rows = group.size(), q.shape[0] // group.size()
    runs: dict[str, Any] = {}
    if same_blocks:
        place = place_in(group, options_for_attention(options, size, causal).schedule)
        runs["rows"] = made_pieces(place, block_rows)
        runs["grad_rows"] = used_pieces(place, block_rows)
    attended = blocked_attention(q, k, v, causal=causal, scale=scale, **runs)
    joined = beside(all_to_all(_by_rows(attended), group), size)
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
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """The plain form of :func:`~commfuse_npu.ops.ulysses.attention_all_to_all_linear`."""
    name = "plain_attention_all_to_all_linear"
    check_self_attention(name, q, k, v, dropout)
    check_sequence(name, q.shape[0], group.size())
    q, weight, bias = autocast(q, weight, bias)
    k, v = k.to(q.dtype), v.to(q.dtype)
    size, block_rows, batch = group.size(), q.shape[0] // group.size(), q.shape[1]
    if not same_blocks:
        attended = plain_attention_all_to_all(q, k, v, group=group, causal=causal, scale=scale)
        return blocked_linear(attended, weight, bias, main_grad=options.main_grad)
    forth, back = (
        place_in(group, options_for_attention(options, size, by_cost).schedule)
        for by_cost in (causal, False)
    )
    attended = blocked_attention(
        q, k, v, causal=causal, scale=scale,
        rows=made_pieces(forth, block_rows),
        grad_rows=swapped_pieces(back, block_rows, "last"),
    )  # fmt: skip
    y = blocked_linear_of_heads(
        all_to_all(_by_rows(attended), group), weight, bias, size,
        rows=[run_of_gemm(run, batch) for run in swapped_pieces(forth, block_rows, "last")],
        grad_rows=[run_of_gemm(run, batch) for run in made_pieces(back, block_rows)],
        options=options,
    )  # fmt: skip
    return y.view(block_rows, batch, weight.shape[0])


def _by_rows(attended: torch.Tensor) -> torch.Tensor:
    """``[S, B, A, D]`` as ``[S * B, A * D]``."""
    return attended.flatten(2).flatten(0, 1)
