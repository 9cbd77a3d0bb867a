"""What layers with self-attention ask of their arguments, and the options they run with."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from commfuse_npu.kernels.cpu import check_attention
from commfuse_npu.layers.options import LinearOptions

__all__ = ["check_self_attention", "options_for_attention", "options_for_scattered_attention"]

_TUNED_CHUNKS = 4
"""Instead of trying: attention is long enough to be cut, and on paced links 4 was fastest or within
the spread at every ratio."""


@lru_cache(maxsize=256)
def options_for_attention(options: LinearOptions, size: int, costs_rise: bool) -> LinearOptions:
    """Chunks of one length; if later queries see more keys, blocks in the order that waits least.

    Attention keeps the statistics of each piece of queries for the backward: that runs the other
    way round, and tapered pieces would have other rows.
    """
    schedule = replace(options.schedule, taper=1.0)
    return replace(options, schedule=schedule.for_causal_blocks(size) if costs_rise else schedule)


def options_for_scattered_attention(
    options: LinearOptions, size: int, costs_rise: bool
) -> LinearOptions:
    """:func:`options_for_attention` whose result is reduce-scattered: no schedule is tried out."""
    if options.tuning is not None:
        schedule = replace(options.schedule, chunks=_TUNED_CHUNKS)
        options = replace(options, schedule=schedule, tuning=None)
    return options_for_attention(options, size, costs_rise)


def check_self_attention(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> None:
    """``q`` is ``[S, B, A, D]``, ``k`` and ``v`` are ``[S, B, G, D]``, and there is no dropout.

    Raises:
        TypeError: they are not floating-point numbers.
        ValueError: shapes or dtypes do not fit each other, or dropout is asked for.
    """
    if dropout:
        raise ValueError(
            f"{name}: dropout is {dropout}; the fused form has none, pass 0 or use Megatron's "
            "attention"
        )
    check_attention(q, k, v, causal=False)
    if not q.is_floating_point():
        raise TypeError(f"{name}: q is {q.dtype}; attention needs a floating-point dtype")
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{name}: {q.shape[0]} queries and {k.shape[0]} keys; self-attention has as many of "
            "one as of the other"
        )
