"""Gathers small objects from all ranks, and names the rank that is missing; on gloo.

``dist.all_gather_object`` says that something failed, not whose part.  Here each rank sends what it
has to every other by itself, so that the transfer that fails has a rank at its other end::

    all receives, all sends; then wait for each, one limit for all of them
"""

from __future__ import annotations

import ctypes
import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MissingRankError", "Swap", "gather_objects"]


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


class Swap:
    """A tensor for every other rank, and one from each, under way.

    Args:
        mine: what every rank gets.
        theirs: where that of each peer goes: of the size that it sends, or gloo ends the process.
        group: of gloo.

    Raises:
        MissingRankError: a connection is gone.
    """

    def __init__(
        self,
        mine: torch.Tensor,
        theirs: dict[int, torch.Tensor],
        group: dist.ProcessGroup,
        tag: int,
    ) -> None:
        self.mine = mine
        self._theirs = theirs
        self._works: list[tuple[int, Any]] = []
        ranks = dist.get_process_group_ranks(group)
        peer = group.rank()
        try:
            for peer, buffer in theirs.items():
                self._works.append((peer, dist.irecv(buffer, ranks[peer], group, tag)))
            for peer in theirs:
                self._works.append((peer, dist.isend(mine, ranks[peer], group, tag)))
        except RuntimeError as error:
            raise MissingRankError(peer, error, self) from error

    def wait(self, end: float) -> dict[int, torch.Tensor]:
        """What the peers sent, by peer; once.

        Args:
            end: by :func:`time.monotonic`.

        Raises:
            MissingRankError: a rank did not send in time, or its connection is gone.
        """
        for peer, work in self._works:
            try:
                # To gloo no time at all means its own limit.
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise MissingRankError(peer, error, self) from error
        return self._theirs


def gather_objects(
    value: Any, group: dist.ProcessGroup, timeout: timedelta, tag: int = 0
) -> list[Any]:
    """``value`` of every rank, in the order of the ranks; small things, by pickle.

    Equals::

        everyone = [None] * n
        dist.all_gather_object(everyone, value, group=group)

    A collective, which on gloo sends two messages to every other rank.  On HCCL it is the lines
    above: messages would open a communicator per pair of ranks, in an order that hangs.

    Args:
        timeout: for all of it, on gloo.
        tag: keeps it apart from what else is under way in the group.

    Raises:
        MissingRankError: a rank did not come in time, or its connection is gone.
    """
    rank, size = group.rank(), group.size()
    if dist.get_backend(group) != "gloo":
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, value, group=group)
        return everyone
    end = time.monotonic() + timeout.total_seconds()
    # Each begins with the next rank, so that not all of them talk to rank 0 first.
    peers = [(rank + distance) % size for distance in range(1, size)]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
    Swap(torch.tensor([mine.numel()]), lengths, group, tag).wait(end)
    theirs = {p: torch.empty(int(length), dtype=torch.uint8) for p, length in lengths.items()}
    Swap(mine, theirs, group, tag).wait(end)
    theirs[rank] = mine
    # Not by way of numpy, which torch does without.
    found = (theirs[peer] for peer in range(size))
    return [pickle.loads(ctypes.string_at(one.data_ptr(), one.numel())) for one in found]
