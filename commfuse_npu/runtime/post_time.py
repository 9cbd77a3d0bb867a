"""What a post costs the host, measured on a lane that is warm."""

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
    """Seconds for which a step's post, and the wait for it, keep the host.

    The median of 16 posts of a number on the first lane, to the next rank and from the one before;
    of all processes of the job the longest, so that all of them decide alike.  A collective of all
    processes, next to the set-up of lanes; it takes a few milliseconds.

    Raises:
        MissingRankError: a process did not come within the transport's ``timeout``.
    """
    mine = torch.zeros(1, device=transport.device_type)
    theirs, lane = torch.zeros_like(mine), transport.lane_groups[0]
    target, source = (transport.ranks[(transport.rank + d) % transport.size] for d in (1, -1))
    seconds = []
    for _ in range(_POSTS):
        begun = time.perf_counter()
        swap = post_swap(lane, mine, theirs, target, source, batched=transport.batched)
        for work in swap:
            transport.wait_for(work)
        seconds.append(time.perf_counter() - begun)
    world = dist.group.WORLD
    assert world is not None
    return float(max(gather_objects(median(seconds), world, transport.timeout)))
