"""Data parallelism with a distributed optimizer: gradient reduce-scatter, parameter all-gather.

With ``--overlap-grad-reduce`` and ``--overlap-param-gather`` the gradients of a bucket (fp32) are
reduce-scattered during the backward of earlier layers, and its parameters (bf16) all-gathered
during the forward of earlier layers.  Buckets are transferred one at a time; the end of the
gradients and the start of the parameters remain exposed.  Reductions are free here: a collective
adds while it copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES

__all__ = ["GRADIENT_BYTES", "Weights", "buckets", "exposed", "exposed_end"]

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


class Weights(NamedTuple):
    """Weights of a layer: parameters on one NPU, and the layer's seconds forward and backward."""

    parameters: float
    forward: float = 0.0
    backward: float = 0.0


def exposed(
    layers: Sequence[Weights],
    ranks: int,
    collective: Callable[[float], float],
    overlaps: tuple[bool, bool],
    distributed: bool,
) -> tuple[float, float]:
    """Exposed seconds of the transfers of gradients and of parameters.

    Args:
        layers: from first to last.
        ranks: of the data-parallel group.
        collective: seconds of a collective, by bytes per block.
        overlaps: whether gradients are reduced during the backward, and parameters gathered during
            the forward; otherwise those transfers are fully exposed.
        distributed: whether a rank keeps only the sums of its shard and gathers parameters;
            otherwise the sums are gathered after the backward.
    """
    order = buckets(layers, ranks)
    shards = [math.ceil(sum(layer.parameters for layer in bucket) / ranks) for bucket in order]
    out = [collective(shard * GRADIENT_BYTES) for shard in shards]
    back = [collective(shard * ITEM_BYTES) for shard in shards]
    backward = [sum(layer.backward for layer in bucket) for bucket in order]
    late = exposed_end(backward, out) if overlaps[0] else sum(out)
    if not distributed:
        return late + sum(out), 0.0
    forward = [sum(layer.forward for layer in bucket) for bucket in order]
    return late, exposed_end(forward, back) if overlaps[1] else sum(back)


def buckets(layers: Sequence[Weights], ranks: int) -> list[list[Weights]]:
    """Layers by bucket, in backward order; Megatron's default size (core 0.12) closes one."""
    limit = max(40_000_000, 1_000_000 * ranks)
    groups: list[list[Weights]] = [[]]
    for layer in reversed(layers):
        groups[-1].append(layer)
        if sum(layer.parameters for layer in groups[-1]) >= limit:
            groups.append([])
    return [bucket for bucket in groups if bucket]


def exposed_end(work: Sequence[float], transfers: Sequence[float]) -> float:
    """Seconds from the end of the backward to the end of the last reduce-scatter.

    With time reversed, the same are the seconds that the first forward waits for parameters.

    Args:
        work, transfers: seconds of each bucket's layers in that direction, and of its transfer, in
            the order in which the buckets become ready.
    """
    time = link = 0.0
    for seconds, transfer in zip(work, transfers, strict=True):
        time += seconds
        link = max(link, time) + transfer
    return link - time
