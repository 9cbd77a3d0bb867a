"""Runs ops unfused, with the collectives of torch.distributed.

An op on a :class:`CollectiveTransport` executes the unfused form of its rule.  This op is the
reference of the fused one, and its fallback for a group of one, an empty input and the like.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast

from commfuse_npu.kernels import kernels_for
from commfuse_npu.plan import RankSpec, Schedule
from commfuse_npu.plan.rules import Piece, Rule
from commfuse_npu.runtime.collectives import (
    Begun,
    all_to_all_rows,
    begin_all_gather,
    begin_reduce_scatter,
    device_backend,
    sum_rows_in_order,
)

if TYPE_CHECKING:
    from commfuse_npu.runtime.executor import Given
    from commfuse_npu.runtime.transport import Transport

__all__ = ["CollectiveRun", "CollectiveTransport"]


class CollectiveTransport:
    """Takes the place of a :class:`.transport.Transport` in every op except buckets.

    Every rank of the group has to call the same ops with the same shapes; they are not compared.

    Args:
        group: the process group of the collectives.
        same_pieces: cut work as the fused op does, and add in its order.  The result has the same
            bits, even if the GEMM library rounds differently for fewer rows.  By default each GEMM
            is one call, as in an unfused layer.
        lanes: the transport that falls back to these collectives; a failure breaks it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        same_pieces: bool = False,
        lanes: Transport | None = None,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.device_type, _ = device_backend(group)
        self.same_pieces = same_pieces
        self._lanes = lanes
        self._run: Callable[..., CollectiveRun] = CollectiveRun

    @property
    def by_collectives(self) -> CollectiveTransport:
        return self

    def spec(self, schedule: Schedule) -> RankSpec:
        if not self.same_pieces:
            schedule = replace(schedule, chunks=1)
        if self._lanes is not None:
            return self._lanes.spec(schedule)
        return RankSpec(schedule, self.rank, self.size)

    def begin(
        self,
        rule: Rule,
        name: str,
        like: torch.Tensor,
        schedule: Schedule = Schedule(),
        options: Hashable = (),
        sum_dtype: torch.dtype | None = None,
    ) -> CollectiveRun:
        """See :meth:`Transport.begin`."""
        return self._run(self, rule, self.spec(schedule), name, like, sum_dtype)

    def agree(self, name: str, *facts: object, **more: object) -> None:
        """Do nothing: ranks are not compared."""

    def wait_for(self, work: Any) -> None:
        """Wait for the ``Work`` of a collective."""
        work.wait() if self._lanes is None else self._lanes.wait_for(work)

    def collectives(self, name: str) -> AbstractContextManager[None]:
        """See :meth:`Transport.collectives`; does nothing without a transport."""
        return nullcontext() if self._lanes is None else self._lanes.collectives(name)

    def interrupted(self, name: str, error: BaseException) -> None:
        """Break the transport, if there is one: other ranks may wait for the next collective."""
        if self._lanes is not None and self.size > 1:
            self._lanes.interrupted(name, error)


class CollectiveRun:
    """An operation on collectives; takes the place of a :class:`.executor.Running`.

    It executes the unfused form of a rule, but not of one for buckets, as a
    :class:`~commfuse_npu.plan.rules.Carrier` of tensors.  It waits for an all-gather when its
    result is read, and for a reduce-scatter at the end.
    """

    def __init__(
        self,
        transport: CollectiveTransport,
        rule: Rule,
        spec: RankSpec,
        name: str,
        like: torch.Tensor,
        sum_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.rule = rule
        self.spec = spec
        self._transport = transport
        self._group = transport.group
        self._like = like
        self._sum_dtype = sum_dtype
        self._kernels = kernels_for(like.device)
        self._given: Mapping[str, Any] = {}
        # By id of the result, which is kept alive so that the id stays unique.
        self._under_way: dict[int, Begun] = {}
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, **given: Given) -> None:
        """See :meth:`Running.run`; nothing runs ahead."""
        self._given = given
        try:
            with _RecordFunctionFast(f"CommFuse: {self.name}"):
                # The rules of buckets alone ask for more than this carrier has.
                self.rule.unfused(self)  # type: ignore[arg-type]
                for result, _ in list(self._under_way.values()):
                    self._read(result)
                for into, total in self._sums:
                    into.copy_(total)
        except BaseException as error:
            self._transport.interrupted(self.name, error)
            raise

    def _begun(self, begun: Begun) -> torch.Tensor:
        self._under_way[id(begun[0])] = begun
        return begun[0]

    def _read(self, matrix: torch.Tensor) -> torch.Tensor:
        """Wait for a matrix if it is the result of an all-gather in flight, and return it."""
        if id(matrix) in self._under_way:
            with self._transport.collectives(self.name):
                self._transport.wait_for(self._under_way.pop(id(matrix))[1])
        return matrix

    def _out(self, out: str | None, rows: int, columns: int) -> torch.Tensor:
        return self._like.new_empty((rows, columns)) if out is None else self._given[out]

    def given(self, buffer: str, rows: int, columns: int) -> torch.Tensor:
        return self._given[buffer]

    def own_block(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.spec.size)[self.spec.rank]

    # ------------------------------------------------------------------ transfers

    def all_gather(self, shard: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        into = None if out is None else self._given[out]
        if self.spec.size == 1:
            return shard if into is None else into.copy_(shard)
        with self._transport.collectives(self.name):
            return self._begun(begin_all_gather(shard, self._group, into))

    def all_to_all(self, blocks: torch.Tensor, *, out: str | None = None) -> torch.Tensor:
        received = blocks
        if self.spec.size > 1:
            with self._transport.collectives(self.name):
                received = all_to_all_rows(blocks, self._group)
        return received if out is None else self._given[out].copy_(received)

    def reduce_scatter(self, whole: torch.Tensor, *, out: str) -> None:
        into = self._given[out]
        if self.spec.size == 1:
            into.copy_(whole)
            return
        wide = whole.to(self._sum_dtype or whole.dtype)
        with self._transport.collectives(self.name):
            if self._own_order:
                into.copy_(sum_rows_in_order(wide, self._group, self._order))
            else:
                self._sums.append((into, self._begun(begin_reduce_scatter(wide, self._group))))

    @property
    def _own_order(self) -> bool:
        """Whether to add in the order of the program, because collectives add in another one."""
        schedule = self.spec.schedule
        differs = schedule.shape == "two_level" or schedule.causal
        return self._transport.same_pieces and differs

    @property
    def _order(self) -> list[int]:
        """The ranks in the order in which the program adds their partials, this one last."""
        spec = self.spec
        peers = [hop.source for hop in spec.schedule.hops(spec.rank, spec.size, "last")]
        return [*peers, spec.rank]

    # ------------------------------------------------------------------ work

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
        a = self._read(a)
        product = self._out(out, a.shape[0], b.shape[1])
        if not self._transport.same_pieces:
            self._kernels.gemm_into(product, a, b)
            return product
        for runs, columns in pieces:
            columns = columns or slice(0, b.shape[1])
            rows = a[runs[0]] if len(runs) == 1 else torch.cat([a[run] for run in runs])
            result = a.new_empty((rows.shape[0], columns.stop - columns.start))
            self._kernels.gemm_into(result, rows, b[:, columns])
            lengths = [run.stop - run.start for run in runs]
            for run, part in zip(runs, result.split(lengths), strict=True):
                product[run, columns] = part
        return product

    def make(
        self, rows: int, columns: int, pieces: Sequence[slice], *, out: str | None
    ) -> torch.Tensor:
        whole = self._out(out, rows, columns)
        for run in pieces if whole.numel() else ():
            self._given["make"](whole[run], run)
        return whole

    def use(
        self, matrix: torch.Tensor, pieces: Sequence[slice], *, first: slice | None = None
    ) -> None:
        whole = self._read(matrix)
        for run in pieces if whole.numel() else ():
            self._given["use"](whole[run], run)

    def wgrad(self, *factors: torch.Tensor) -> None:
        self._given["wgrad"](*(self._read(factor) for factor in factors))
