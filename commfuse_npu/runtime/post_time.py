"""Measures the host time of a post, on a warmed-up lane."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from commfuse_npu.runtime.gather_objects import gather_objects
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.transport import Transport

__all__ = ["post_seconds"]

_POSTS = 16


def post_seconds(transport: Transport) -> float:
    """Host seconds to post a step and to wait for it.

    The median of 16 posts of one element on the first lane, to the next rank and from the previous
    one; then the maximum over all processes, so that all of them choose alike.  All processes of
    the job call it after creating lanes; it takes a few milliseconds.

    Raises:
        MissingRankError: a process did not call it within the transport's ``timeout``.
    """
    element = torch.zeros(1, device=transport.device_type)
    received, lane = torch.zeros_like(element), transport.lane_groups[0]
    target, source = (transport.ranks[(transport.rank + d) % transport.size] for d in (1, -1))
    seconds = []
    for _ in range(_POSTS):
        begun = time.perf_counter()
        swap = post_swap(lane, element, received, target, source, batched=transport.batched)
        for work in swap:
            transport.wait_for(work)
        seconds.append(time.perf_counter() - begun)
    world = dist.group.WORLD
    assert world is not None
    return float(max(gather_objects(median(seconds), world, transport.timeout)))
