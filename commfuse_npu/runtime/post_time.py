"""Measures the host time of a post, on warmed-up lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collectives import begin_all_gather, begin_all_to_all
from commfuse_npu.runtime.gather_objects import gather_objects
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.transport import Transport

__all__ = ["post_seconds"]

_ROUNDS = 16


def post_seconds(transport: Transport, schedule: Schedule) -> float:
    """Host seconds to post a step of a schedule and to wait for it.

    In each of 16 rounds every rank posts what programs of that schedule post for one chunk: a batch
    per peer on its lane, or for the shape ``collective`` an all-gather and an all-to-all.  The
    result is the mean of a round, the median of all rounds, and then the maximum over all
    processes, so that all of them choose alike.  All processes of the job call it after creating
    lanes, with a schedule for groups of at least two ranks; it takes a few milliseconds.

    Raises:
        MissingRankError: a process did not call it within the transport's ``timeout``.
    """
    posts = _posts(transport, schedule)
    seconds = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for post in posts:
            for work in post():
                work.wait()
        seconds.append((time.perf_counter() - begun) / len(posts))
    world = dist.group.WORLD
    assert world is not None
    return float(max(gather_objects(median(seconds), world, transport.timeout)))


def _posts(transport: Transport, schedule: Schedule) -> list[Callable[[], Sequence[Any]]]:
    """What posts one element per block; each returns the works to wait for."""
    spec = transport.spec(schedule)
    lanes = transport.lane_groups
    ranks = transport.ranks
    blocks = torch.zeros(spec.size, device=transport.device_type)
    received = torch.zeros_like(blocks)
    if spec.as_collective:
        return [
            lambda: [begin_all_gather(blocks[:1], lanes[0], received)[1]],
            lambda: [begin_all_to_all(blocks, lanes[0], received)[1]],
        ]
    return [
        partial(
            post_swap,
            lanes[hop.lane],
            blocks[:1],
            received[:1],
            ranks[hop.target],
            ranks[hop.source],
        )
        for hop in spec.schedule.hops(spec.rank, spec.size, "first")
    ]
