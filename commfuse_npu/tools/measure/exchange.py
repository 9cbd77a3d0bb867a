"""Messages between ranks, posted in batches, whose content is checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_npu.runtime.transport import Transport, post_swap

__all__ = ["Batch", "Exchange"]

Batch = tuple[dist.ProcessGroup, Sequence[int]]
"""A group over the ranks, and distances: to rank ``r + d`` and from ``r - d`` for each of them."""


class _Swap(NamedTuple):
    """What comes from rank ``source`` while this rank's message goes to ``target``."""

    theirs: torch.Tensor
    target: int
    source: int
    expected: int


class Exchange:
    """A message from every rank to some others, again and again into the same buffers.

    Args:
        transport: of the ranks; it posts in its own way what is a batch of one message.
        size: bytes of each message.
        batches: in the order in which they are posted.
    """

    def __init__(self, transport: Transport, size: int, batches: Iterable[Batch]) -> None:
        self._transport = transport
        self._mine = torch.full(
            (size,), _mark(transport.rank), dtype=torch.uint8, device=transport.device_type
        )
        self._batches = [(group, [self._swap(d) for d in ds]) for group, ds in batches]
        self._works: list[Any] = []

    def run(self) -> None:
        """:meth:`begin` and :meth:`end`."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """Post all batches, in their order."""
        for group, swaps in self._batches:
            if len(swaps) == 1:
                theirs, target, source, _ = swaps[0]
                batched = self._transport.batched
                self._works += post_swap(group, self._mine, theirs, target, source, batched=batched)
                continue
            # In which order they are in the batch is the same to HCCL; gloo has receives first.
            operations = [dist.P2POp(dist.irecv, one.theirs, one.source, group) for one in swaps]
            operations += [dist.P2POp(dist.isend, self._mine, one.target, group) for one in swaps]
            self._works += dist.batch_isend_irecv(operations)

    def end(self) -> None:
        """Wait for all of it."""
        for work in self._works:
            self._transport.wait_for(work)
        self._works = []

    def check(self) -> None:
        """Whether everything arrived where it belongs.

        Raises:
            RuntimeError: it did not.
        """
        for _, swaps in self._batches:
            for theirs, _, source, expected in swaps:
                if not bool((theirs == expected).all()):
                    raise RuntimeError(
                        f"a message of {theirs.numel()} bytes from rank {source} has other bytes "
                        f"than {expected} in it: transfers were mixed up"
                    )

    def _swap(self, distance: int) -> _Swap:
        transport = self._transport
        size = transport.size
        source = (transport.rank - distance) % size
        target = transport.ranks[(transport.rank + distance) % size]
        theirs = torch.zeros_like(self._mine)
        return _Swap(theirs, target, transport.ranks[source], _mark(source))


def _mark(rank: int) -> int:
    """What a message of a rank consists of; never 0, of which buffers are before."""
    return 1 + rank % 255
