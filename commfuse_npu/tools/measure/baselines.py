"""Baselines for comparison: the unfused layers of :mod:`commfuse_npu.ops`, in several orders.

Legend: ``n`` ranks, ``s`` rows of a block, ``[n * s, F]`` the full tensor.

A layer on a :class:`Baseline` executes the lines of its rule, as on every
:class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport`.  A :class:`Carrier` has
the transfers and buffers, a :class:`Blocking` says what is computed while they are under way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap.transfers import handing_over
from commfuse_npu.plan import split
from commfuse_npu.plan.rules import Piece, column_backward
from commfuse_npu.runtime.collective_transport import CollectiveRun, CollectiveTransport, Lines

# The names of the collectives differ between versions of torch; that module knows them.
from commfuse_npu.runtime.collectives import _all_gather, _reduce_scatter
from commfuse_npu.runtime.executor import Work

__all__ = [
    "Baseline",
    "Blocking",
    "Carrier",
    "Computation",
    "DirectExchange",
    "MegatronOrder",
    "Sliced",
]

# ------------------------------------------------------------------- transfers


class Carrier:
    """torch's own collectives, which the stream of a device runs in order.

    Buffers are reused, as in the fused ops, so that no side of the comparison allocates memory that
    the other does not.  On a device that is in the order of the stream that used them.

    Attributes:
        group: the process group for communication.
        idle: unused buffers, by shape.
        blocked_seconds: host time spent in waits so far; on a device the stream waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.blocked_seconds = group, 0.0
        self.idle: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)

    def take(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """A contiguous tensor with undefined contents, of the dtype and device of ``like``."""
        idle = self.idle[shape]
        return idle.pop() if idle else like.new_empty(shape)

    def release(self, *buffers: torch.Tensor) -> None:
        """Return the results of :meth:`take` for reuse."""
        for buffer in buffers:
            self.idle[tuple(buffer.shape)].append(buffer)

    def all_gather(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        """``[s, F]`` of every rank to ``[n * s, F]``, with the arguments of torch's."""
        return _all_gather(out, shard, group=group, async_op=async_op)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        """The sum of ``[n * s, F]`` over the ranks to this rank's ``[s, F]``, likewise."""
        return _reduce_scatter(out, full, group=group, async_op=async_op)


class DirectExchange(Carrier):
    """Sends every block directly from its rank to the rank that needs it, all at once, over gloo.

    gloo's own reduce-scatter sends the bytes of an all-reduce, and its threads run several
    collectives at once.  For a group of all ranks.  The partials are added in the order r-1, ...,
    r+1, the own one last: the same bits as the fused ops and gloo's reduce-scatter.  Between two
    ranks the socket keeps the order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._rank, self._size, self._messages = group.rank(), group.size(), 0
        self._targets = [(self._rank + k) % self._size for k in range(1, self._size)]
        self._sources = [(self._rank - k) % self._size for k in range(1, self._size)]

    # In forward-backward overlap, both sides take turns at them as at torch's own.
    @partial(handing_over, wait_hands_over=False)
    def all_gather(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        blocks = out.chunk(self._size)
        exchange = self._begun([shard] * len(self._sources), [blocks[r] for r in self._sources])
        blocks[self._rank].copy_(shard)
        return exchange if async_op else exchange.wait()

    @partial(handing_over, wait_hands_over=True)
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        blocks = full.chunk(self._size)
        # The first partial arrives directly in the sum.
        partials = [self.take(out, *out.shape) for _ in range(self._size - 2)]

        def add() -> None:
            for other in (*partials, blocks[self._rank]):
                out.add_(other)
            self.release(*partials)

        exchange = self._begun([blocks[r] for r in self._targets], [out, *partials], add)
        return exchange if async_op else exchange.wait()

    def _begun(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        finish: Callable[[], None] = lambda: None,
    ) -> _Exchange:
        """Start sending a tensor to each target and receiving one from each source."""
        # gloo sends its notice that a receive is ready on the same socket as data: receives first.
        tag = self._messages & 0x7FFFFFFF
        self._messages += 1
        pairs = zip(receives, self._sources, strict=True), zip(sends, self._targets, strict=True)
        works = [dist.irecv(tensor, rank, self.group, tag) for tensor, rank in pairs[0]]
        works += [dist.isend(tensor, rank, self.group, tag) for tensor, rank in pairs[1]]
        return _Exchange(self, works, finish)


class _Exchange:
    """The ``Work`` of an exchange; what ``finish`` does after the transfers is not waiting."""

    def __init__(self, carrier: Carrier, works: list[Any], finish: Callable[[], None]) -> None:
        self._carrier, self._works, self._finish = carrier, works, finish

    def wait(self) -> None:
        if not self._works:  # waited for already, when the overlap recorded its time
            return
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self._carrier.blocked_seconds += time.perf_counter() - start
        self._works = []
        self._finish()


# ------------------------------------------------------------------- orders


class Baseline(CollectiveTransport):
    """Runs layers in the order of ``run``, with the transfers and buffers of a carrier."""

    def __init__(self, carrier: Carrier, run: Callable[..., Blocking]) -> None:
        super().__init__(carrier.group)
        self.carrier, self._run = carrier, run

    @property
    def blocked_seconds(self) -> float:
        """Host seconds spent waiting for transfers since the start."""
        return self.carrier.blocked_seconds

    def begin(
        self,
        program: Lines,
        name: str,
        like: torch.Tensor,
        options: Hashable = (),
        sum_dtype: torch.dtype | None = None,
    ) -> CollectiveRun:
        return self._run(self, program, name, like, sum_dtype)


class Blocking(CollectiveRun):
    """Sequential: a collective, then the GEMM, or the GEMM, then the collective.

    ::

        compute  |        | GEMM |          compute  | GEMM |         |
        links    | gather |      |          links    |      | scatter |

    Its buffers are kept for the next run, as those of the fused ops.
    """

    def __init__(self, transport: Baseline, *of: Any) -> None:
        super().__init__(transport, *of)
        self._carrier, self._taken = transport.carrier, list[torch.Tensor]()

    @property
    def overlaps(self) -> bool:
        """Whether the next line is executed while a transfer is under way."""
        return False

    def run(
        self,
        works: Mapping[str, Work | None] | None = None,
        **tensors: torch.Tensor | None,
    ) -> None:
        super().run(works, **tensors)
        self._carrier.release(*self._taken)

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        whole = self._take(self.spec.size * shard.shape[0], shard.shape[1])
        return self._posted(self._carrier.all_gather, whole, shard)

    def reduce_scatter(self, whole: torch.Tensor, *, out: str, finish: bool = False) -> None:
        self._posted(self._carrier.reduce_scatter, self._tensors[out], whole)

    def _posted(
        self, collective: Callable[..., Any], out: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        work = collective(out, source, group=self._group, async_op=self.overlaps)
        return out if work is None else self._begun((out, work))

    def _out(self, out: str | None, rows: int, columns: int) -> torch.Tensor:
        return self._take(rows, columns) if out is None else self._tensors[out]

    def _take(self, rows: int, columns: int) -> torch.Tensor:
        """A buffer for the rest of the run."""
        self._taken.append(self._carrier.take(self._like, rows, columns))
        return self._taken[-1]


class Computation(Blocking):
    """No transfers: only the computation of a workload remains.

    Results are not meaningful.  Gathered tensors hold copies of a shard, so that a GEMM reads
    real numbers from real memory.
    """

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        known, key = self._transport.remembered, (__name__, shard.shape)
        if key not in known:
            known[key] = torch.cat([shard.detach()] * self.spec.size)
        whole: torch.Tensor = known[key]
        return whole

    def reduce_scatter(self, whole: torch.Tensor, *, out: str, finish: bool = False) -> None:
        self._tensors[out].copy_(self.own_block(whole))


class MegatronOrder(Blocking):
    """Megatron-Core's column-parallel backward: two collectives behind two GEMMs.

    Read in ``LinearWithGradAccumulationAndAsyncCommunication`` of Megatron-Core 0.12::

        compute  | dgrad    |              wgrad   |
        links    | gather x | reduce-scatter of dx |

    Forward, and the backward of the row-parallel layer, block.
    """

    @property
    def overlaps(self) -> bool:
        return self.program.rule is column_backward

    def reduce_scatter(self, whole: torch.Tensor, *, out: str, finish: bool = False) -> None:
        # Megatron waits for its gather before it starts to scatter.
        for gathered, _ in list(self._under_way.values()):
            self._read(gathered)
        super().reduce_scatter(whole, out=out, finish=finish)


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
        if self.program.rule is column_backward:
            return super().all_gather(shard)
        whole = self._take(self.spec.size * shard.shape[0], shard.shape[1])
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
            with_product = self._product(super()._read(part), b)
            self._blocks(self._tensors[out])[:, run].copy_(self._blocks(with_product))
            self._carrier.release(with_product)
        return self._tensors[out]

    def reduce_scatter(self, whole: torch.Tensor, *, out: str, finish: bool = False) -> None:
        (a, b), into = self._factors, self._tensors[out]
        for run in self._runs(into.shape[0]):
            part = self._blocks(a)[:, run]
            rows = self._carrier.take(a, part.shape[0] * part.shape[1], a.shape[1])
            self._blocks(rows).copy_(part)
            product = self._product(rows, b)
            self._carrier.release(rows)
            self._taken.append(product)
            self._posted(self._carrier.reduce_scatter, into[run], product)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = self._carrier.take(a, a.shape[0], b.shape[1])
        self._kernels.gemm_into(product, a, b)
        return product

    def _runs(self, rows: int) -> list[slice]:
        return [slice(start, stop) for start, stop in pairwise(split(rows, self._slices))]

    def _blocks(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.unflatten(0, (self.spec.size, -1))
