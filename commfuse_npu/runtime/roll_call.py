"""Every rank hears every other, or learns which one is missing; on gloo.

``dist.all_gather_object`` says that something failed, not whose part.  Here each rank sends what it
has to every other by itself, so that the transfer that fails has a rank at its other end::

    all receives, all sends; then wait for each, one limit for all of them
"""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MissingRankError", "roll_call"]


class MissingRankError(RuntimeError):
    """A rank did not answer.

    Attributes:
        peer: its place in the group.
        left_over: what is still under way, to be held as long as the group lives.
    """

    def __init__(self, peer: int, why: object, left_over: object) -> None:
        super().__init__(f"no answer from peer {peer}: {why}")
        self.peer = peer
        self.left_over = left_over


def roll_call(value: Any, group: dist.ProcessGroup, timeout: timedelta) -> list[Any]:
    """``value`` of every rank, in the order of the ranks; small things, by pickle.

    Equals::

        everyone = [None] * n
        dist.all_gather_object(everyone, value, group=group)

    A collective of a gloo group.  It sends two messages to every other rank.

    Args:
        timeout: for all of it.

    Raises:
        MissingRankError: a rank did not come in time, or its connection is gone.
    """
    rank, size = group.rank(), group.size()
    end = time.monotonic() + timeout.total_seconds()
    # Each begins with the next rank, so that not all of them talk to rank 0 first.
    peers = [(rank + distance) % size for distance in range(1, size)]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
    _swap(torch.tensor([mine.numel()]), lengths, group, end)
    theirs = {p: torch.empty(int(length), dtype=torch.uint8) for p, length in lengths.items()}
    _swap(mine, theirs, group, end)
    theirs[rank] = mine
    return [pickle.loads(theirs[peer].numpy().tobytes()) for peer in range(size)]


def _swap(
    mine: torch.Tensor, theirs: dict[int, torch.Tensor], group: dist.ProcessGroup, end: float
) -> None:
    ranks = dist.get_process_group_ranks(group)
    works: list[tuple[int, Any]] = []
    peer = group.rank()
    try:
        for peer, buffer in theirs.items():
            works.append((peer, dist.irecv(buffer, ranks[peer], group)))
        for peer in theirs:
            works.append((peer, dist.isend(mine, ranks[peer], group)))
        for peer, work in works:  # noqa: B007 - the error names it
            # To gloo no time at all means its own limit.
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
    except RuntimeError as error:
        raise MissingRankError(peer, error, (works, mine, theirs)) from error
