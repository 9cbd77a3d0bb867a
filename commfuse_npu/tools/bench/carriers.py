"""How a baseline's collectives are carried: by torch, by direct exchanges, or not at all.

Legend: ``n`` ranks, ``s`` rows of a block, ``[n * s, F]`` the whole tensor.

All three have the same three methods.  ``gather(shard)`` and ``scatter(full, out)`` begin; the
``wait()`` of what they return ends, and gives the result.  What ``gather`` gave goes back with
``give_back``.  Buffers are used again, as the product's are, so that neither side pays for fresh
memory that the other one does not.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap.transfers import active_turns

# The names of the collectives differ between versions of torch; that module knows them.
from commfuse_npu.runtime.collectives import _all_gather, _reduce_scatter

__all__ = [
    "BufferPool",
    "Carrier",
    "DirectExchange",
    "NoTransfers",
    "Pending",
    "TakingTurns",
    "TorchCollectives",
]


class BufferPool:
    """Buffers of the baselines, used again: they allocate no more often than the product does.

    On a device a buffer is reused in the order of the stream that used it; lend to one stream only.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor with undefined contents."""
        idle = self._idle.get((tuple(shape), dtype, device))
        return idle.pop() if idle else torch.empty(tuple(shape), dtype=dtype, device=device)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for one in buffers:
            self._idle.setdefault((tuple(one.shape), one.dtype, one.device), []).append(one)

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()


class Pending:
    """A collective under way.

    Args:
        carrier: whose ``blocked_seconds`` the waiting is added to.
        result: what :meth:`wait` returns, complete by then.
        finish: called once, after the waiting.
    """

    def __init__(
        self,
        carrier: Carrier,
        works: list[Any],
        result: torch.Tensor,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._carrier, self._works, self._finish = carrier, works, finish
        self.result = result

    def arrive(self) -> None:
        """Wait for the transfers; at once if they were waited for."""
        if self._works:
            start = time.perf_counter()
            for work in self._works:
                work.wait()
            self._works = []
            self._carrier.blocked_seconds += time.perf_counter() - start

    def wait(self) -> torch.Tensor:
        """The result; only the waiting for transfers counts as blocked, not the additions."""
        self.arrive()
        self._finish()
        return self.result


class Carrier(ABC):
    """What a baseline needs.

    Attributes:
        in_order: several collectives may be under way at once and come one after the other.
        blocked_seconds: host time spent in waits since the start.
    """

    in_order = True

    def __init__(self, rank: int, size: int, pool: BufferPool) -> None:
        self.rank, self.size, self.pool = rank, size, pool
        self.blocked_seconds = 0.0

    @abstractmethod
    def gather(self, shard: torch.Tensor) -> Pending:
        """Begin ``[s, F] -> [n * s, F]``."""

    def give_back(self, whole: torch.Tensor) -> None:
        """Lend the result of :meth:`gather` to others."""
        self.pool.give_back([whole])

    @abstractmethod
    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        """Begin the sum of ``[n * s, F]`` over the ranks, of which ``out`` gets its ``[s, F]``."""

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        """Blocking: the result of :meth:`gather`."""
        return self.gather(shard).wait()

    def scattered(self, full: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Blocking: the result of :meth:`scatter`."""
        return self.scatter(full, out).wait()


class _OverGroup(Carrier):
    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        super().__init__(group.rank(), group.size(), pool)
        self._group = group

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        shape = (self.size * shard.shape[0], *shard.shape[1:])
        return self.pool.take(shape, shard.dtype, shard.device)


class TorchCollectives(_OverGroup):
    """torch's own collectives."""

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        super().__init__(group, pool)
        # A device's stream keeps them in order; gloo's threads run them side by side.
        self.in_order = "gloo" not in dist.get_backend(group)

    def gather(self, shard: torch.Tensor) -> Pending:
        whole = self._whole(shard)
        work = _all_gather(whole, shard, group=self._group, async_op=True)
        return Pending(self, [work], whole)

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        work = _reduce_scatter(out, full, group=self._group, async_op=True)
        return Pending(self, [work], out)


class DirectExchange(_OverGroup):
    """Every block straight from the rank that has it to the rank that needs it, all at once.

    Of a group of all ranks.

    The partials are added in the order r-1, ..., r+1, the own one last: the bits of the product and
    of gloo's reduce-scatter.  Between a pair of ranks the socket (or the stream) keeps the order.
    """

    def __init__(self, group: dist.ProcessGroup, pool: BufferPool) -> None:
        super().__init__(group, pool)
        self._targets = [(self.rank + k) % self.size for k in range(1, self.size)]
        self._sources = [(self.rank - k) % self.size for k in range(1, self.size)]
        self._messages = 0
        # On HCCL single operations would open a communicator per pair [read].
        self._batched = dist.get_backend(group) != "gloo"

    def swap(self, out: torch.Tensor, target: int, into: torch.Tensor, source: int) -> Pending:
        """Begin to send ``out`` to one rank and to receive ``into``, the result, from another."""
        works = self._exchange([out], [target], [into], [source])
        return Pending(self, works, into)

    def _exchange(
        self,
        sends: list[torch.Tensor],
        targets: list[int],
        receives: list[torch.Tensor],
        sources: list[int],
    ) -> list[Any]:
        group = self._group
        if self._batched:
            operations = [
                operation
                for out, target, into, source in zip(sends, targets, receives, sources, strict=True)
                for operation in (
                    dist.P2POp(dist.isend, out, target, group),
                    dist.P2POp(dist.irecv, into, source, group),
                )
            ]
            return list(dist.batch_isend_irecv(operations))
        # The notice that a receive is ready shares gloo's socket with bulk data: receives first.
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
        sends = [shard] * (self.size - 1)
        works = self._exchange(sends, self._targets, receives, self._sources)
        blocks[self.rank].copy_(shard)
        return Pending(self, works, whole)

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        blocks = full.unflatten(0, (self.size, -1))
        # The first partial arrives where the sum is wanted.
        others = [self.pool.take(out.shape, out.dtype, out.device) for _ in range(self.size - 2)]
        sends = [blocks[target] for target in self._targets]
        works = self._exchange(sends, self._targets, [out, *others], self._sources)

        def add() -> None:
            for partial in (*others, blocks[self.rank]):
                out.add_(partial)
            self.pool.give_back(others)

        return Pending(self, works, out, add)


class TakingTurns(DirectExchange):
    """Direct exchanges whose waits are places to hand over while a forward and a backward pair.

    As :mod:`commfuse_npu.overlap` has it of torch's collectives.
    """

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        return self._blocking(super().gather(shard))

    def scattered(self, full: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._blocking(super().scatter(full, out))

    def gather(self, shard: torch.Tensor) -> Pending:
        return self._asynchronous(super().gather(shard), False)

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        return self._asynchronous(super().scatter(full, out), True)

    def _blocking(self, pending: Pending) -> torch.Tensor:
        turns = active_turns()
        if turns is not None:
            work = SimpleNamespace(wait=pending.arrive)
            turns.place(True, work, work)
        return pending.wait()

    def _asynchronous(self, pending: Pending, hands_over: bool) -> Pending:
        turns = active_turns()
        if turns is None:
            return pending
        work = SimpleNamespace(wait=pending.arrive)
        turns.place(False, work)

        def arrive_at_a_turn() -> torch.Tensor:
            turns.place(hands_over, waits_for=work)
            return pending.wait()

        return SimpleNamespace(wait=arrive_at_a_turn)  # type: ignore[return-value]


class NoTransfers(Carrier):
    """Nothing is carried: what is left of a work is its computation.

    Results are made up.  Gathered tensors hold copies of the shard, so that a GEMM reads real
    numbers from real memory.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, BufferPool())
        self._wholes: dict[tuple[object, ...], torch.Tensor] = {}

    def gather(self, shard: torch.Tensor) -> Pending:
        key = tuple(shard.shape), shard.dtype
        if key not in self._wholes:
            self._wholes[key] = torch.cat([shard.detach()] * self.size)
        whole = self._wholes[key]
        return Pending(self, [], whole)

    def give_back(self, whole: torch.Tensor) -> None:
        """It is kept here."""

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Pending:
        block = full.unflatten(0, (self.size, -1))[self.rank]
        return Pending(self, [], block)
