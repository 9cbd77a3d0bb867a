"""The options that attention runs with."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from commfuse_npu.layers.options import LinearOptions

__all__ = ["options_for_attention", "options_for_scattered_attention"]

_TUNED_CHUNKS = 4
"""Instead of trying: attention is long enough to be cut, and on paced links 4 was fastest or within
the spread at every ratio."""


@lru_cache(maxsize=256)
def options_for_attention(options: LinearOptions, size: int, causal: bool) -> LinearOptions:
    """Chunks of one length; under a causal mask blocks in the order that waits least.

    Attention keeps the statistics of each piece of queries for the backward: that runs the other
    way round, and tapered pieces would have other rows.
    """
    schedule = replace(options.schedule, taper=1.0)
    return replace(options, schedule=schedule.for_causal_blocks(size) if causal else schedule)


def options_for_scattered_attention(
    options: LinearOptions, size: int, causal: bool
) -> LinearOptions:
    """:func:`options_for_attention` whose result is reduce-scattered: no schedule is tried out."""
    if options.tuning is not None:
        schedule = replace(options.schedule, chunks=_TUNED_CHUNKS)
        options = replace(options, schedule=schedule, tuning=None)
    return options_for_attention(options, size, causal)
