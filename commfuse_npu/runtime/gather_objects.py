"""Gathers small objects from all ranks; on gloo an error names the missing rank.

``dist.all_gather_object`` does not say which rank failed.  Here each rank sends its object to every
other one in a separate message, so that a failed transfer identifies the peer::

    all receives, all sends; then wait for each, with one timeout for all of them
"""

from __future__ import annotations

import ctypes
import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.collectives import device_backend

__all__ = ["MissingRankError", "gather_objects"]


class MissingRankError(RuntimeError):
    """A rank did not answer.

    Attributes:
        peer: its rank in the group.
        left_over: transfers in flight, to be kept alive as long as the group exists.
    """

    def __init__(self, peer: int, why: object, left_over: object) -> None:
        super().__init__(f"no answer from peer {peer}: {why}")
        self.peer = peer
        self.left_over = left_over


def _swap(
    tensor: torch.Tensor,
    received: dict[int, torch.Tensor],
    group: dist.ProcessGroup,
    tag: int,
    end: float,
) -> None:
    """Send a tensor to every other rank, and receive one from each.

    Args:
        received: receive buffers by peer, of the size that it sends; else gloo aborts the process.
        end: deadline, by :func:`time.monotonic`.
    """
    ranks = dist.get_process_group_ranks(group)
    works: list[tuple[int, Any]] = []
    peer = group.rank()
    try:
        for peer, buffer in received.items():
            works.append((peer, dist.irecv(buffer, ranks[peer], group, tag)))
        for peer in received:
            works.append((peer, dist.isend(tensor, ranks[peer], group, tag)))
        for peer, work in works:  # noqa: B007 (the error names it)
            # Not 0, for which gloo uses its own timeout.
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
    except RuntimeError as error:
        raise MissingRankError(peer, error, (tensor, received, works)) from error


def gather_objects(
    value: Any, group: dist.ProcessGroup, timeout: timedelta, tag: int = 0
) -> list[Any]:
    """All-gather a small picklable object; returns the values in the order of the ranks.

    Equals::

        everyone = [None] * n
        dist.all_gather_object(everyone, value, group=group)

    All ranks call it.  On gloo it sends two messages to every other rank.  On HCCL it runs the two
    lines above, because messages would open a communicator per pair of ranks, in an order that
    hangs.

    Args:
        timeout: for the whole call, on gloo.
        tag: separates its messages from others in flight in the group.

    Raises:
        MissingRankError: a rank did not call it in time, or its connection is closed.
    """
    rank = group.rank()
    size = group.size()
    if device_backend(group)[1] != "gloo":
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, value, group=group)
        return everyone
    end = time.monotonic() + timeout.total_seconds()
    # Each rank starts with the next one, so that they do not all send to rank 0 first.
    peers = [(rank + distance) % size for distance in range(1, size)]
    message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
    _swap(torch.tensor([message.numel()]), lengths, group, tag, end)
    messages = {p: torch.empty(int(length), dtype=torch.uint8) for p, length in lengths.items()}
    _swap(message, messages, group, tag, end)
    messages[rank] = message
    # Not through numpy, which torch does not require.
    ordered = (messages[peer] for peer in range(size))
    return [pickle.loads(ctypes.string_at(data.data_ptr(), data.numel())) for data in ordered]
