"""Data parallelism with a distributed optimizer: buckets of gradients out, of parameters in.

With ``--overlap-grad-reduce`` and ``--overlap-param-gather`` the gradients of a bucket (fp32) are
reduce-scattered while the backward of earlier layers runs, and its parameters (bf16) all-gathered
while the forward of earlier layers runs.  Buckets go one after the other; what remains exposed is
the end of the first and the beginning of the second.  A collective adds while it copies, which is
free here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commfuse_npu.hardware.machine import ITEM_BYTES

__all__ = ["GRADIENT_BYTES", "bucket_parameters", "buckets", "exposed", "exposed_gather",
           "exposed_scatter"]  # fmt: skip

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


def exposed(
    ranks: int,
    layers: Sequence[tuple[float, float, float]],
    collective: Callable[[float], float],
    overlaps: tuple[bool, bool] = (True, True),
    distributed: bool = True,
) -> tuple[float, float]:
    """Seconds that gradients and parameters leave exposed.

    Args:
        ranks: of the data-parallel group.
        layers: parameters on one NPU, seconds of forward and backward, from the first to the last.
        collective: seconds of one over blocks of so many bytes.
        overlaps: whether gradients go out during the backward, and parameters come in during the
            forward; else all of both is exposed.
        distributed: whether a rank keeps the sums of its shard only, and gathers parameters; else
            sums are gathered behind the backward.
    """
    parameters, forward, backward = zip(*layers, strict=True)
    order = buckets(parameters, ranks)
    shards = [math.ceil(sum(parameters[layer] for layer in one) / ranks) for one in order]
    out = [collective(shard * GRADIENT_BYTES) for shard in shards]
    back = [collective(shard * ITEM_BYTES) for shard in shards]
    late = exposed_scatter(backward, order, out) if overlaps[0] else sum(out)
    if not distributed:
        return late + sum(out), 0.0
    return late, exposed_gather(forward, order, back) if overlaps[1] else sum(back)


def bucket_parameters(ranks: int) -> int:
    """From how many parameters on a bucket is closed, by Megatron's default (core 0.12)."""
    return max(40_000_000, 1_000_000 * ranks)


def buckets(parameters: Sequence[float], ranks: int) -> list[list[int]]:
    """Layers by bucket, in the order of the backward: a bucket is closed when it is large enough.

    Args:
        parameters: of each layer on one NPU, from the first layer to the last.
    """
    limit = bucket_parameters(ranks)
    found: list[list[int]] = [[]]
    held = 0.0
    for layer in reversed(range(len(parameters))):
        found[-1].append(layer)
        held += parameters[layer]
        if held >= limit:
            found.append([])
            held = 0.0
    return [bucket for bucket in found if bucket]


def exposed_scatter(
    layers: Sequence[float], order: Sequence[Sequence[int]], transfers: Sequence[float]
) -> float:
    """Seconds after the backward until the last bucket is there.

    Args:
        layers: seconds of each layer's backward, from the first layer to the last.
        order: layers of each bucket, in the order in which they become ready.
        transfers: seconds of each bucket.
    """
    time = link = 0.0
    for bucket, transfer in zip(order, transfers, strict=True):
        time += sum(layers[layer] for layer in bucket)
        link = max(link, time) + transfer
    return link - time


def exposed_gather(
    layers: Sequence[float], order: Sequence[Sequence[int]], transfers: Sequence[float]
) -> float:
    """Seconds that the first forward waits for parameters; buckets arrive in forward order.

    Args:
        layers: seconds of each layer's forward.
        order, transfers: as for :func:`exposed_scatter`, in the order of the backward.
    """
    time = link = work = 0.0
    for bucket, transfer in zip(reversed(order), reversed(transfers), strict=True):
        link += transfer
        seconds = sum(layers[layer] for layer in bucket)
        time, work = max(time, link) + seconds, work + seconds
    return time - work
