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

from commfuse_npu.hardware.machine import ITEM_BYTES

__all__ = ["GRADIENT_BYTES", "buckets", "exposed", "exposed_end"]

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


def exposed(
    ranks: int,
    layers: Sequence[tuple[float, float, float]],
    collective: Callable[[float], float],
    overlaps: tuple[bool, bool] = (True, True),
    distributed: bool = True,
) -> tuple[float, float]:
    """Exposed seconds of the transfers of gradients and of parameters.

    Args:
        ranks: of the data-parallel group.
        layers: parameters on one NPU, seconds of forward and of backward, from first to last layer.
        collective: seconds of a collective, by bytes per block.
        overlaps: whether gradients are reduced during the backward, and parameters gathered during
            the forward; otherwise those transfers are fully exposed.
        distributed: whether a rank keeps only the sums of its shard and gathers parameters;
            otherwise the sums are gathered after the backward.
    """
    parameters, forward, backward = zip(*layers, strict=True)
    order = buckets(parameters, ranks)
    shards = [math.ceil(sum(parameters[layer] for layer in bucket) / ranks) for bucket in order]
    out = [collective(shard * GRADIENT_BYTES) for shard in shards]
    back = [collective(shard * ITEM_BYTES) for shard in shards]
    late = exposed_end(backward, order, out) if overlaps[0] else sum(out)
    if not distributed:
        return late + sum(out), 0.0
    return late, exposed_end(forward, order, back) if overlaps[1] else sum(back)


def buckets(parameters: Sequence[float], ranks: int) -> list[list[int]]:
    """Layers by bucket, in backward order; Megatron's default size (core 0.12) closes one.

    Args:
        parameters: of each layer on one NPU, from first to last layer.
    """
    limit = max(40_000_000, 1_000_000 * ranks)
    groups: list[list[int]] = [[]]
    held = 0.0
    for layer in reversed(range(len(parameters))):
        groups[-1].append(layer)
        held += parameters[layer]
        if held >= limit:
            groups.append([])
            held = 0.0
    return [bucket for bucket in groups if bucket]


def exposed_end(
    layers: Sequence[float], order: Sequence[Sequence[int]], transfers: Sequence[float]
) -> float:
    """Seconds from the end of the backward to the end of the last reduce-scatter.

    With time reversed, the same are the seconds that the first forward waits for parameters.

    Args:
        layers: seconds of each layer in that direction, from first to last layer.
        order: layers of each bucket, in the order in which the buckets become ready.
        transfers: seconds of each bucket's transfer.
    """
    time = link = 0.0
    for bucket, transfer in zip(order, transfers, strict=True):
        time += sum(layers[layer] for layer in bucket)
        link = max(link, time) + transfer
    return link - time
