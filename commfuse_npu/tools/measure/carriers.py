"""The transfers of the baselines' collectives: of a device, direct exchanges on a CPU, or none.

Legend: ``n`` ranks, ``s`` rows of a block, ``[n * s, F]`` the full tensor.

``gather(shard)`` and ``scatter(full, out)`` start a collective; ``result()`` of the returned object
waits for it.  Buffers are reused, as in the fused ops, so that no side of the comparison allocates
memory that the other does not: :meth:`Carrier.take` gets one, :meth:`Carrier.release` returns it.
On a device a buffer is reused in the order of the stream that used it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap.transfers import active_turns

# The names of the collectives differ between versions of torch; that module knows them.
from commfuse_npu.runtime.collectives import _all_gather, _reduce_scatter

__all__ = ["Carrier", "DirectExchange", "NoTransfers", "Pending", "TorchCollectives"]


class Pending:
    """A running collective.

    In forward-backward overlap (:mod:`commfuse_npu.overlap`) it allows a hand-over at the same
    places as torch's collectives: a blocking one between its start and its wait, an overlapping one
    (see :meth:`overlapping`) at both.

    Args:
        carrier: its ``blocked_seconds`` are increased by the waiting time.
        value: returned by :meth:`result`, complete by then.
        finish: called once, after the waiting.
        hands_over: whether an overlapping one hands over before its wait if no order says
            otherwise.
    """

    def __init__(
        self,
        carrier: Carrier,
        works: list[Any],
        value: torch.Tensor,
        finish: Callable[[], None] = lambda: None,
        *,
        hands_over: bool = False,
    ) -> None:
        self._carrier, self._works, self._value, self._finish = carrier, works, value, finish
        self._hands_over, self._overlaps = hands_over, False

    def overlapping(self) -> Pending:
        """Mark it as overlapping: other work follows before its result; returns itself."""
        self._overlaps = True
        if (turns := active_turns()) is not None:
            turns.reach_point(False, self)
        return self

    def wait(self) -> None:
        """Wait for the transfers; the additions afterwards do not count as blocked time."""
        if self._works:
            start = time.perf_counter()
            for work in self._works:
                work.wait()
            self._works = []
            self._carrier.blocked_seconds += time.perf_counter() - start

    def result(self) -> torch.Tensor:
        if (turns := active_turns()) is not None:
            if self._overlaps:
                turns.reach_point(self._hands_over, waits_for=self)
            else:
                turns.reach_point(True, self, self)
        self.wait()
        self._finish()
        return self._value


class Carrier(ABC):
    """The transfers and buffers that baselines share.

    Attributes:
        group: the process group for communication.
        idle: unused buffers, by shape, dtype and device.
        blocked_seconds: host seconds spent waiting since the start.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.idle = group, dict[tuple[object, ...], list[torch.Tensor]]()
        self.rank, self.size = group.rank(), group.size()
        self.blocked_seconds = 0.0

    def take(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A contiguous tensor with undefined contents, of the dtype and device of ``like``."""
        idle = self.idle.get((shape, like.dtype, like.device))
        return idle.pop() if idle else like.new_empty(shape)

    def release(self, *buffers: torch.Tensor) -> None:
        """Return the results of :meth:`take` and :meth:`gather` for reuse."""
        for buffer in buffers:
            self.idle.setdefault((tuple(buffer.shape), buffer.dtype, buffer.device), []).append(
                buffer
            )

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        return self.take(shard, self.size * shard.shape[0], *shard.shape[1:])

    @abstractmethod
    def gather(self, shard: torch.Tensor) -> Pending:
        """Start ``[s, F] -> [n * s, F]``."""

    @abstractmethod
    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        """Start the sum of ``[n * s, F]`` over the ranks; ``out`` gets this rank's ``[s, F]``."""


class TorchCollectives(Carrier):
    """torch's own collectives, which the stream of a device runs in order."""

    def gather(self, shard: torch.Tensor) -> Pending:
        whole = self._whole(shard)
        return Pending(self, [_all_gather(whole, shard, group=self.group, async_op=True)], whole)

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        work = _reduce_scatter(out, full, group=self.group, async_op=True)
        return Pending(self, [work], out)


class DirectExchange(Carrier):
    """Sends every block directly from its rank to the rank that needs it, all at once, over gloo.

    gloo's own reduce-scatter sends the bytes of an all-reduce, and its threads run several
    collectives at once.  For a group of all ranks.  The partials are added in the order r-1, ...,
    r+1, the own one last: the same bits as the fused ops and gloo's reduce-scatter.  Between two
    ranks the socket keeps the order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._targets = [(self.rank + k) % self.size for k in range(1, self.size)]
        self._sources = [(self.rank - k) % self.size for k in range(1, self.size)]
        self._messages = 0

    def _exchange(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Start sending a tensor to each target and receiving one from each source."""
        group, targets, sources = self.group, self._targets, self._sources
        # gloo sends its notice that a receive is ready on the same socket as data: receives first.
        tag = self._messages & 0x7FFFFFFF
        self._messages += 1
        return [
            *(dist.irecv(t, r, group, tag) for t, r in zip(receives, sources, strict=True)),
            *(dist.isend(t, r, group, tag) for t, r in zip(sends, targets, strict=True)),
        ]

    def gather(self, shard: torch.Tensor) -> Pending:
        whole = self._whole(shard)
        blocks = whole.unflatten(0, (self.size, -1))
        receives = [blocks[source] for source in self._sources]
        works = self._exchange([shard] * len(receives), receives)
        blocks[self.rank].copy_(shard)
        return Pending(self, works, whole)

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        blocks = full.unflatten(0, (self.size, -1))
        # The first partial arrives directly in the buffer of the sum.
        partials = [self.take(out, *out.shape) for _ in range(self.size - 2)]
        sends = [blocks[target] for target in self._targets]
        works = self._exchange(sends, [out, *partials])

        def add() -> None:
            for partial in (*partials, blocks[self.rank]):
                out.add_(partial)
            self.release(*partials)

        return Pending(self, works, out, add, hands_over=True)


class NoTransfers(Carrier):
    """No transfers: only the computation of a workload remains.

    Results are not meaningful.  Gathered tensors hold copies of the shard, so that a GEMM reads
    real numbers from real memory.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._wholes: dict[tuple[object, ...], torch.Tensor] = {}

    def gather(self, shard: torch.Tensor) -> Pending:
        key = tuple(shard.shape), shard.dtype
        if key not in self._wholes:
            self._wholes[key] = torch.cat([shard.detach()] * self.size)
        return Pending(self, [], self._wholes[key])

    def release(self, *buffers: torch.Tensor) -> None:
        """Return buffers for reuse, except gathered ones, which are kept here."""
        gathered = {id(whole) for whole in self._wholes.values()}
        super().release(*(buffer for buffer in buffers if id(buffer) not in gathered))

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        return Pending(self, [], full.unflatten(0, (self.size, -1))[self.rank])
