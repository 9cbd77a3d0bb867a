"""Data parallelism with a distributed optimizer: buckets of gradients out, of parameters in.

The gradients of a bucket (fp32) are reduce-scattered while the backward of earlier layers runs; its
parameters (bf16) are all-gathered while the forward of earlier layers runs.  Buckets go one after
the other; what remains exposed is the end of the first and the beginning of the second.

======================  ========================================================================
``blocking``            Megatron without ``--overlap-grad-reduce`` and ``--overlap-param-gather``:
                        everything is exposed
``overlapped``          with both of them; a collective adds while it copies, which is free here
``commfuse``            ``--commfuse-dp``: the programs of :mod:`commfuse_npu.ops.buckets`; partial
                        sums are added when all layers are done
======================  ========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.plan import DATA_PARALLEL_LANES
from commfuse_npu.plan.program import Compute
from commfuse_npu.plan.rules import bucket_gather, bucket_scatter
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.rank import Rank, Width
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["BUCKET_PARAMETERS", "GRADIENT_BYTES", "DataParallel", "Exchanged", "buckets",
           "exchanged", "exposed_gather", "exposed_scatter"]  # fmt: skip

DataParallel = Literal["blocking", "overlapped", "commfuse"]

BUCKET_PARAMETERS = 40_000_000
"""Megatron's default, at least a million per rank of the group."""
GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


def buckets(layer_parameters: Sequence[float], ranks: int) -> list[list[int]]:
    """Layers by bucket, in the order of the backward: a bucket is closed when it is large enough.

    Args:
        layer_parameters: of each layer on one NPU, from the first layer to the last.
    """
    limit = max(BUCKET_PARAMETERS, 1_000_000 * ranks)
    found: list[list[int]] = [[]]
    held = 0.0
    for layer in reversed(range(len(layer_parameters))):
        found[-1].append(layer)
        held += layer_parameters[layer]
        if held >= limit:
            found.append([])
            held = 0.0
    return [bucket for bucket in found if bucket]


class Exchanged(NamedTuple):
    """Seconds of a bucket: its gradients on their way, adding them afterwards, its parameters."""

    scatter: float
    sums: float
    gather: float


def exchanged(group: Group, elements: int) -> Exchanged:
    """By CommFuse's programs.

    Args:
        group: the data-parallel ranks.
        elements: of a rank's shard.
    """
    lanes = min(DATA_PARALLEL_LANES, group.direct.lanes_for(group.size))
    variant = Variant("buckets", "fused", schedule=replace(group.direct, lanes=lanes))
    shard = elements * GRADIENT_BYTES

    def finish(_: Compute, __: Width) -> float:
        return group.machine.memory(3 * shard)

    def gradients(rank: Rank) -> None:
        # Memory for the partials of a whole shard: one chunk of all peers.
        program = bucket_scatter(rank.place("gradients"), elements, group.size - 1, 1)
        works = {"finish": finish}
        rank.run("gradients", program, {"bucket": 1}, works, item=GRADIENT_BYTES)

    def parameters(rank: Rank) -> None:
        program = bucket_gather(rank.place("parameters"), elements, True)
        rank.run("parameters", program, {"bucket": 1}, {}, item=ITEM_BYTES)

    work = group.build(variant, gradients, 0).launches.operations
    sums = sum(operation.seconds for operation in work)
    # What is added is added later: here only the transfers count.
    free = replace(group, machine=replace(group.machine, hbm_bandwidth=math.inf))
    scatter, gather = (free.play(variant, one, whole=False) for one in (gradients, parameters))
    return Exchanged(scatter.seconds, sums, gather.seconds)


def exposed_scatter(
    layers: Sequence[float],
    order: Sequence[Sequence[int]],
    transfers: Sequence[float],
    sums: Sequence[float],
) -> float:
    """Seconds after the backward until the last bucket is summed.

    Args:
        layers: seconds of each layer's backward, from the first layer to the last.
        order: layers of each bucket, in the order in which they become ready.
        transfers: seconds of each bucket.
        sums: seconds of adding up each bucket after the backward; 0 if transfers add.
    """
    time = link = 0.0
    arrivals = []
    for bucket, transfer in zip(order, transfers, strict=True):
        time += sum(layers[layer] for layer in bucket)
        link = max(link, time) + transfer
        arrivals.append(link)
    end = time
    for arrival, seconds in zip(arrivals, sums, strict=True):
        end = max(end, arrival) + seconds
    return end - time


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
