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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.plan import DATA_PARALLEL_LANES
from commfuse_npu.plan.program import Compute
from commfuse_npu.plan.rules import bucket_gather, bucket_scatter
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.rank import Rank, Width
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["GRADIENT_BYTES", "DataParallel", "buckets", "exposed", "exposed_gather",
           "exposed_scatter"]  # fmt: skip

DataParallel = Literal["blocking", "overlapped", "commfuse"]

_BUCKET_PARAMETERS = 40_000_000
"""Megatron's default, at least a million per rank of the group."""
GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


def exposed(
    group: Group,
    layers: Sequence[tuple[float, float, float]],
    how: DataParallel,
    collective: Callable[[float], float],
) -> tuple[float, float]:
    """Seconds that gradients and parameters leave exposed.

    Args:
        group: the data-parallel ranks.
        layers: parameters on one NPU, seconds of forward and backward, from the first to the last.
        collective: seconds of a plain one, over blocks of so many bytes.
    """
    parameters, forward, backward = zip(*layers, strict=True)
    order = buckets(parameters, group.size)
    shards = [math.ceil(sum(parameters[layer] for layer in one) / group.size) for one in order]
    if how == "commfuse":
        out, sums, back = zip(*(_by_programs(group, shard) for shard in shards), strict=True)
    else:
        out, back = (
            tuple(collective(shard * size) for shard in shards)
            for size in (GRADIENT_BYTES, ITEM_BYTES)
        )
        sums = (0.0,) * len(shards)
    if how == "blocking":
        return sum(out), sum(back)
    return exposed_scatter(backward, order, out, sums), exposed_gather(forward, order, back)


def buckets(parameters: Sequence[float], ranks: int) -> list[list[int]]:
    """Layers by bucket, in the order of the backward: a bucket is closed when it is large enough.

    Args:
        parameters: of each layer on one NPU, from the first layer to the last.
    """
    limit = max(_BUCKET_PARAMETERS, 1_000_000 * ranks)
    found: list[list[int]] = [[]]
    held = 0.0
    for layer in reversed(range(len(parameters))):
        found[-1].append(layer)
        held += parameters[layer]
        if held >= limit:
            found.append([])
            held = 0.0
    return [bucket for bucket in found if bucket]


@lru_cache(4096)
def _by_programs(group: Group, elements: int) -> tuple[float, float, float]:
    """Seconds of a bucket by CommFuse's programs: gradients, adding them afterwards, parameters.

    Args:
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

    sums = sum(one.seconds for one in group.build(variant, gradients, 0).operations)
    # What is added is added later: here only the transfers count.
    free = replace(group, machine=replace(group.machine, hbm_bandwidth=math.inf))
    scatter, gather = (free.play(variant, one, whole=False) for one in (gradients, parameters))
    return scatter.seconds, sums, gather.seconds


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
