"""Tensor-parallel attention and its projection over the collectives of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.layers.attention_mask import AttentionMask
from commfuse_npu.layers.attention_options import (
    check_self_attention,
    options_for_scattered_attention,
)
from commfuse_npu.layers.attention_runs import run_of_gemm
from commfuse_npu.layers.documents import Documents
from commfuse_npu.layers.linear_arguments import autocast, check_divisible
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan.rules import made_pieces, used_pieces
from commfuse_npu.reference.blocked_attention import blocked_attention
from commfuse_npu.reference.blocked_linear import Piece, blocked_linear
from commfuse_npu.reference.collective_functions import reduce_scatter
from commfuse_npu.reference.place import place_in, sources_of

__all__ = ["plain_attention_linear_reduce_scatter"]


def plain_attention_linear_reduce_scatter(
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
    """The plain form of :func:`~commfuse_npu.ops.attention.attention_linear_reduce_scatter`."""
    name = "plain_attention_linear_reduce_scatter"
    check_self_attention(name, q, k, v, dropout)
    mask = AttentionMask(causal, documents, hidden).checked(name, q)
    check_divisible(name, q, group.size())
    q, weight, bias = autocast(q, weight, bias)
    k, v = k.to(q.dtype), v.to(q.dtype)
    options = options_for_scattered_attention(options, group.size(), mask.costs_rise)
    sources = None
    runs: dict[str, Any] = {}
    gemms: dict[str, Any] = {}
    if same_blocks:
        place, rows = place_in(group, options.schedule), q.shape[0] // group.size()
        made, used = made_pieces(place, rows), used_pieces(place, rows)
        runs = {"rows": made, "grad_rows": used}
        gemms = {"forward": _pieces(made, q.shape[1]), "dgrad": _pieces(used, q.shape[1])}
        if options.wgrad == "blocks":
            gemms["wgrad"] = [piece for piece, _ in gemms["dgrad"]]
        if place.schedule.shape != "shifted" or place.schedule.costs is not None:
            sources = sources_of(place)  # else the collective's own order
    attended = blocked_attention(q, k, v, **mask._asdict(), scale=scale, **runs).flatten(2)
    full = blocked_linear(attended, weight, main_grad=options.main_grad, **gemms)
    y = reduce_scatter(full, group, options.reduce_dtype, sources)
    return y if bias is None else y + bias


def _pieces(runs: list[slice], batch: int) -> list[Piece]:
    """Runs of queries as those of a GEMM's rows."""
    return [((run_of_gemm(run, batch),), None) for run in runs]
