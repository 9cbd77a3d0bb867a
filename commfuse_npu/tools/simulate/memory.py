"""Device memory that a variant needs for communication, besides a layer's inputs and results.

The largest of a layer's operations counts, the backward of a column-parallel linear: it holds the
gathered input, and the gradient of all rows or what a pipeline holds of it.
"""

from __future__ import annotations

from commfuse_npu.plan import Plan
from commfuse_npu.tools.simulate.llama import SUM_BYTES, LayerShape
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["buffers", "lanes"]


def buffers(variant: Variant, shape: LayerShape) -> float:
    """Bytes of gathered tensors, partial sums and scratch."""
    if variant.kind == "compute" or shape.ranks == 1:
        return 0.0
    whole = float(shape.rows * shape.row_bytes)
    if variant.kind == "sliced":
        # And what the reordering copy writes.
        return 3 * whole
    if variant.schedule is None:
        return 2 * whole
    scattered = 2 * _scratch(variant.schedule.plan("reduce_scatter", 0, shape.ranks), shape)
    if variant.wgrad == "whole":
        return whole + scattered
    # The input is used as it arrives and never whole; the gradient is summed in fp32.
    widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // shape.ranks
    summed = SUM_BYTES * shape.hidden * widest
    return _scratch(variant.schedule.plan("gather", 0, shape.ranks), shape) + scattered + summed


def _scratch(plan: Plan, shape: LayerShape) -> float:
    rows = sum(plan.slot_rows(slot, shape.block) for slot in range(plan.window))
    return float(rows * shape.row_bytes)


def lanes(variant: Variant) -> int:
    """Communicators: one for plain collectives, one per lane for plans."""
    if variant.kind == "compute":
        return 0
    return variant.schedule.lanes if variant.schedule else 1
