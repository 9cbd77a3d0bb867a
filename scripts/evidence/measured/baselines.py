"""Baselines for comparison: the unfused layers of :mod:`commfuse_npu.ops`, in several orders.

Legend: ``n`` ranks, ``s`` rows of a block, ``[n * s, F]`` the full tensor.

A layer on a :class:`Baseline`, which has the transfers, executes the unfused form of its rule, as
on every :class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport`.  A
:class:`Blocking` says what is computed while they are under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from commfuse_npu.plan import split
from commfuse_npu.plan.rules import ColumnBackward, Piece
from commfuse_npu.runtime.collective_transport import CollectiveRun, CollectiveTransport
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.transport import Transport

# ------------------------------------------------------------------- transfers


class Baseline(CollectiveTransport):
    """Sends every block directly from its rank to the rank that needs it, all at once, over gloo.

    gloo's own reduce-scatter sends the bytes of an all-reduce, and its threads run several
    collectives at once.  For a group of all ranks, with a lane for each distance, as the fused ops
    have; its sockets keep the order.  The partials are added in the order r-1, ..., r+1, the own
    one last: the same bits as the fused ops and gloo's reduce-scatter.

    Attributes:
        blocked_seconds: host time spent in waits so far.
    """

    def __init__(self, lanes: Transport, order: Callable[..., Blocking]) -> None:
        super().__init__(lanes.group)
        self._run = order
        self.blocked_seconds = 0.0
        self._hops = [
            (lane, (self.rank + distance) % self.size, (self.rank - distance) % self.size)
            for distance, lane in enumerate(lanes.lane_groups, 1)
        ]

    # [s, F] of every rank to [n * s, F]; the sum of [n * s, F] over the ranks to [s, F].
    def all_gather(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        blocks = out.chunk(self.size)
        works = list[Any]()
        for lane, target, source in self._hops:
            works += post_swap(lane, shard, blocks[source], target, source)
        blocks[self.rank].copy_(shard)
        exchange = _ExchangeWork(self, works)
        return exchange if async_op else exchange.wait()

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        blocks = full.chunk(self.size)
        works = list[Any]()
        # The first partial arrives directly in the sum.
        partials = [out, *(torch.empty_like(out) for _ in self._hops[1:])]
        for (lane, target, source), part in zip(self._hops, partials, strict=True):
            works += post_swap(lane, blocks[target], part, target, source)

        def add() -> None:
            for other in (*partials[1:], blocks[self.rank]):
                out.add_(other)

        exchange = _ExchangeWork(self, works, add)
        return exchange if async_op else exchange.wait()


class _ExchangeWork:
    """The ``Work`` of an exchange; what ``finish`` does after the transfers is not waiting."""

    def __init__(
        self, of: Baseline, works: list[Any], finish: Callable[[], None] = lambda: None
    ) -> None:
        self._of = of
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self._of.blocked_seconds += time.perf_counter() - start
        self._works = []
        self._finish()


# ------------------------------------------------------------------- orders


class Blocking(CollectiveRun):
    """Sequential: a collective, then the GEMM, or the GEMM, then the collective.

    ::

        compute  |        | GEMM |          compute  | GEMM |         |
        links    | gather |      |          links    |      | scatter |
    """

    _transport: Baseline

    @property
    def overlaps(self) -> bool:
        """Whether the next line is executed while a transfer is under way."""
        return False

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        whole = shard.new_empty(self.spec.size * shard.shape[0], shard.shape[1])
        return self._posted(self._transport.all_gather, whole, shard)

    def reduce_scatter(self, whole: torch.Tensor, *, out: str) -> None:
        self._posted(self._transport.reduce_scatter, self._given[out], whole)

    def _posted(
        self, collective: Callable[..., Any], out: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        work = collective(out, source, group=self._group, async_op=self.overlaps)
        return out if work is None else self._begun((out, work))


_gathered: WeakKeyDictionary[CollectiveTransport, dict[torch.Size, torch.Tensor]]
_gathered = WeakKeyDictionary()


class Computation(Blocking):
    """No transfers: only the computation of a workload remains.

    Results are not meaningful.  Gathered tensors hold copies of a shard, so that a GEMM reads
    real numbers from real memory.
    """

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        known = _gathered.setdefault(self._transport, {})
        if shard.shape not in known:
            known[shard.shape] = torch.cat([shard.detach()] * self.spec.size)
        return known[shard.shape]

    def reduce_scatter(self, whole: torch.Tensor, *, out: str) -> None:
        self._given[out].copy_(self.own_block(whole))


class MegatronOrder(Blocking):
    """Megatron-Core's column-parallel backward: two collectives behind two GEMMs.

    Read in ``LinearWithGradAccumulationAndAsyncCommunication`` of Megatron-Core 0.12::

        compute  | dgrad    |              wgrad   |
        links    | gather x | reduce-scatter of dx |

    Forward, and the backward of the row-parallel layer, block.
    """

    @property
    def overlaps(self) -> bool:
        return isinstance(self.rule, ColumnBackward)

    def reduce_scatter(self, whole: torch.Tensor, *, out: str) -> None:
        # Megatron waits for its gather before it starts to scatter.
        for gathered, _ in list(self._under_way.values()):
            self._read(gathered)
        super().reduce_scatter(whole, out=out)


class Sliced(Blocking):
    """The rows in slices, with a smaller collective per slice, pipelined with the GEMMs.

    This is MindSpeed's CoC, from its description: slices along m, one asynchronous collective per
    slice, then a copy that restores the order of rows.  The first or the last slice is exposed::

        compute  |          | GEMM 0   | GEMM 1   |      compute  | GEMM 0 | GEMM 1    |           |
        links    | gather 0 | gather 1 |          |      links    |        | scatter 0 | scatter 1 |

    In the backward, dx is scattered in slices.  The weight gradient needs all rows and runs as one
    GEMM during the last scatter.  A rank's block must have at least as many rows as slices.
    """

    overlaps = True

    def __init__(self, *of: Any, slices: int) -> None:
        super().__init__(*of)
        self._slices = slices
        # By id of the gathered tensor: rows of a shard, and these rows of all shards.
        self._parts: dict[int, list[tuple[slice, torch.Tensor]]] = {}
        self._factors: tuple[torch.Tensor, torch.Tensor]

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        if isinstance(self.rule, ColumnBackward):
            return super().all_gather(shard)
        whole = shard.new_empty(self.spec.size * shard.shape[0], shard.shape[1])
        runs = self._runs(shard.shape[0])
        self._parts[id(whole)] = [(run, super(Sliced, self).all_gather(shard[run])) for run in runs]
        return whole

    def _read(self, matrix: torch.Tensor) -> torch.Tensor:
        for run, part in self._parts.pop(id(matrix), ()):
            self._blocks(matrix)[:, run].copy_(self._blocks(super()._read(part)))
        return super()._read(matrix)

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        pieces: Sequence[Piece],
        *,
        out: str | None = None,
        first: slice | None = None,
        last: slice | None = None,
    ) -> torch.Tensor:
        if out is None:  # the product is computed slice by slice, as it is scattered
            self._factors = a, b
            return a
        for run, part in self._parts[id(a)]:
            product = super().gemm(part, b, ())
            self._blocks(self._given[out])[:, run].copy_(self._blocks(product))
        return self._given[out]

    def reduce_scatter(self, whole: torch.Tensor, *, out: str) -> None:
        a, b = self._factors
        into = self._given[out]
        for run in self._runs(into.shape[0]):
            rows = self._blocks(a)[:, run].flatten(0, 1)
            product = super().gemm(rows, b, ())
            self._posted(self._transport.reduce_scatter, into[run], product)

    def _runs(self, rows: int) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(split(rows, self._slices))]

    def _blocks(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(0, (self.spec.size, -1))
