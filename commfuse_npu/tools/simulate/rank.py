"""What one rank of a group does, collective by collective: plans and variants as operations.

The fused forms launch what :mod:`commfuse_npu.runtime.pipeline` and :mod:`commfuse_npu.ops.linear`
launch, in their order, including the window that bounds their scratch memory.

Legend: a *block* is the part of one rank, ``rows`` rows of ``row_bytes`` bytes; ``work(run)`` gives
the seconds of work on a run of rows of the whole tensor, which has ``n * rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from commfuse_npu.plan import Kind, Own, Piece, Plan, Schedule, Step, split
from commfuse_npu.tools.simulate.machine import Machine
from commfuse_npu.tools.simulate.program import Key, Message, Program
from commfuse_npu.tools.simulate.variants import Variant, direct

__all__ = ["AllToAll", "Gather", "Rank", "Scatter", "Work", "gemm"]

Work = Callable[[slice], float]
"""Seconds of work on a run of rows of the whole tensor."""

_COLLECTIVE = "collective"


def gemm(machine: Machine, inner: float, outer: float) -> Work:
    """``[run, inner] @ [inner, outer]``."""
    return lambda run: machine.gemm(run.stop - run.start, inner, outer)


class Rank:
    """Builds the program of one rank.

    Args:
        members_per_node: ranks of the group in a node, ``size`` if it fits one.
    """

    def __init__(
        self, machine: Machine, rank: int, size: int, members_per_node: int, variant: Variant
    ) -> None:
        self.machine, self.rank, self.size, self.variant = machine, rank, size, variant
        self.members_per_node = members_per_node
        self.program = Program(machine.batched)
        self._pending: tuple[int, ...] = ()

    def compute(
        self, name: str, seconds: float, after: Iterable[int] = (), launches: int = 1
    ) -> int:
        """Work that needs what was received ``after``, and what :meth:`need` named."""
        waits, self._pending = (*after, *self._pending), ()
        return self.program.compute(name, seconds, waits, launches)

    def need(self, exchanges: Iterable[int]) -> None:
        """The next work needs these exchanges to be done."""
        self._pending = (*self._pending, *exchanges)

    def finish(self) -> Program:
        """End with waiting for what is left."""
        if self._pending:
            self.compute("end", 0.0, launches=0)
        return self.program

    def collective(
        self, name: str, kind: Kind, rows: float, row_bytes: float, *, launches: int = 1
    ) -> tuple[int, ...]:
        """A plain collective over blocks of ``rows`` rows; returns what to wait for.

        Its own work (sums) is taken as free: HCCL adds while it copies.
        """
        if self.size == 1 or self.variant.kind == "compute":
            return ()
        prefix = self.program.unique(name)
        if self.variant.ring:
            return self._around(name, kind, rows * row_bytes, prefix, launches)
        schedule = direct(self.size, self.members_per_node)
        plan = schedule.plan(kind, self.rank, self.size)
        sends, receives = [], []
        for step in plan.transfers:
            sent, received = _messages(step, prefix, rows * row_bytes, rows * row_bytes)
            sends.append(sent)
            receives.append(received)
        return self.program.exchange(name, _COLLECTIVE, sends, receives, launches=launches)

    def _around(
        self, name: str, kind: Kind, size: float, prefix: Key, launches: int
    ) -> tuple[int, ...]:
        plan = Schedule("ring", 1, 1).plan(kind, self.rank, self.size)
        waits: tuple[int, ...] = ()
        for step in plan.transfers:
            sent, received = _messages(step, prefix, size, size)
            waits = self.program.exchange(
                name, _COLLECTIVE, [sent], [received], after=waits, launches=launches
            )
            launches = 0
        return waits

    # ------------------------------------------------------------- gather -> work

    def gather_then_work(
        self,
        name: str,
        rows: int,
        row_bytes: float,
        work: Work,
        *,
        whole: bool = False,
        copied_row_bytes: float = 0.0,
        inner: int = 0,
    ) -> tuple[int, ...]:
        """All-gather blocks and work on them; returns what to wait for until all are there.

        Args:
            whole: whether the gathered tensor is kept, so that blocks arrive in place.
            copied_row_bytes: of the result, which slicing by rows leaves in another order.
            inner: the inner dimension of the GEMM, which fused kernels limit.
        """
        kind, everything = self.variant.kind, slice(0, rows * self.size)
        if kind == "fused" and self.size > 1:
            gather = Gather(self, name, rows, row_bytes, in_place=whole)
            gather.consume(work)
            return gather.finish()
        if kind == "sliced" and self.size > 1:
            bounds = split(rows, self.variant.slices)
            waits = [
                self.collective(f"{name} gather", "gather", stop - start, row_bytes)
                for start, stop in pairwise(bounds)
            ]
            for (start, stop), wait in zip(pairwise(bounds), waits, strict=True):
                run = slice(start * self.size, stop * self.size)
                self.compute(name, work(run), wait)
            if self.variant.slices > 1:
                traffic = 2 * rows * self.size * copied_row_bytes
                self.compute(f"{name} reorder", self.machine.memory(traffic))
            return waits[-1]
        if self._takes_kernel(inner):
            waits_all = self.collective(f"{name} gather", "gather", rows, row_bytes, launches=0)
            seconds = work(everything)
            last = seconds / (_TILES * self.size)
            self.compute(name, seconds - last)
            self.compute(f"{name} last tile", last, waits_all, launches=0)
            return waits_all
        waits_all = self.collective(f"{name} gather", "gather", rows, row_bytes)
        self.compute(name, work(everything), waits_all)
        return waits_all

    # ------------------------------------------------------------- work -> scatter

    def work_then_scatter(
        self,
        name: str,
        rows: int,
        row_bytes: float,
        work: Work,
        *,
        copied_row_bytes: float = 0.0,
        inner: int = 0,
        behind: Callable[[], None] | None = None,
    ) -> None:
        """Work on blocks and reduce-scatter the result, which the next work needs.

        Args:
            copied_row_bytes: of the input, which slicing by rows needs in another order.
            inner: the inner dimension of the GEMM, which fused kernels limit.
            behind: work that needs not the sum; it hides the end of the transfers, except in the
                ``plain`` variants, which wait first.
        """
        kind, everything = self.variant.kind, slice(0, rows * self.size)
        waits: tuple[int, ...] = ()
        if kind == "fused" and self.size > 1:
            scatter = Scatter(self, name, rows, row_bytes)
            scatter.produce(work)
            if behind is not None:
                behind()
            scatter.finish()
            return
        if kind == "sliced" and self.size > 1:
            # A slice holds rows of every block, so the input is reordered first.
            if self.variant.slices > 1:
                traffic = 2 * rows * self.size * copied_row_bytes
                self.compute(f"{name} reorder", self.machine.memory(traffic))
            for start, stop in pairwise(split(rows, self.variant.slices)):
                self.compute(name, work(slice(start * self.size, stop * self.size)))
                waits = self.collective(
                    f"{name} scatter", "reduce_scatter", stop - start, row_bytes
                )
        elif self._takes_kernel(inner):
            seconds = work(everything)
            first = seconds / (_TILES * self.size)
            self.compute(f"{name} first tile", first)
            share = 1 / _TILES
            self.collective(
                f"{name} scatter", "reduce_scatter", rows * (1 - share), row_bytes, launches=0
            )
            self.compute(name, seconds - first, launches=0)
            waits = self.collective(
                f"{name} last scatter", "reduce_scatter", rows * share, row_bytes, launches=0
            )
        else:
            self.compute(name, work(everything))
            waits = self.collective(f"{name} scatter", "reduce_scatter", rows, row_bytes)
            if kind == "plain":
                self.need(waits)
                waits = ()
        if behind is not None:
            behind()
        self.need(waits)

    def _takes_kernel(self, inner: int) -> bool:
        return (
            self.variant.kind == "kernel"
            and self.size in _KERNEL_RANKS
            and self.members_per_node == self.size
            and _KERNEL_INNER[0] <= inner < _KERNEL_INNER[1]
        )

    # ------------------------------------------------------------- backward of a column

    def column_backward(
        self,
        name: str,
        rows: int,
        row_bytes: float,
        dgrad: Work,
        wgrad: Work,
        *,
        copied_row_bytes: float,
    ) -> None:
        """dgrad blocks -> sum; the input arrives again -> wgrad.

        Args:
            copied_row_bytes: of the gradient that arrives, as for :meth:`work_then_scatter`.
        """
        kind, everything = self.variant.kind, slice(0, rows * self.size)
        blocks = self.variant.wgrad == "blocks"
        if kind == "fused" and self.size > 1:
            gather = Gather(
                self,
                f"{name} re-gather",
                rows,
                row_bytes,
                in_place=not blocks,
                ahead=self.variant.schedule.lanes
                if self.machine.batched and self.variant.schedule
                else None,
            )
            scatter = Scatter(self, f"{name} dgrad", rows, row_bytes, queued=True)
            scatter.produce(dgrad, between=gather.advance)
            if blocks:
                gather.consume(wgrad)
                gather.finish()
            else:
                self.compute(f"{name} wgrad", wgrad(everything), gather.finish())
            scatter.finish()
            return
        waits = self.collective(f"{name} re-gather", "gather", rows, row_bytes)
        if kind == "plain":
            self.need(waits)

        def behind() -> None:
            self.compute(f"{name} wgrad", wgrad(everything), waits)

        # A fused kernel has no form for this backward: inner is left out.
        self.work_then_scatter(
            f"{name} dgrad", rows, row_bytes, dgrad, copied_row_bytes=copied_row_bytes,
            behind=behind,
        )  # fmt: skip

    def row_backward(
        self,
        name: str,
        rows: int,
        row_bytes: float,
        dgrad: Work,
        wgrad: Work,
        *,
        copied_row_bytes: float,
        inner: int,
    ) -> None:
        """Gradient blocks arrive -> dgrad, then wgrad over all of them, or of each."""
        everything = slice(0, rows * self.size)
        if self.variant.kind == "fused" and self.size > 1 and self.variant.wgrad == "blocks":
            gather = Gather(self, f"{name} dgrad, wgrad", rows, row_bytes, in_place=False)
            gather.consume(lambda run: dgrad(run) + wgrad(run))
            gather.finish()
            return
        waits = self.gather_then_work(
            f"{name} dgrad",
            rows,
            row_bytes,
            dgrad,
            whole=True,
            copied_row_bytes=copied_row_bytes,
            inner=inner,
        )
        self.compute(f"{name} wgrad", wgrad(everything), waits)


_TILES = 16
"""Pieces of a fused kernel's GEMM between which it can wait; assumed."""
_KERNEL_RANKS = (2, 4, 8)
_KERNEL_INNER = (256, 65535)


def _messages(step: Step, prefix: Key, sent: float, received: float) -> tuple[Message, Message]:
    send, receive = step.send, step.receive
    assert send is not None
    assert receive is not None
    return (
        Message((*prefix, send.step, send.source), send.source, send.target, sent),
        Message((*prefix, receive.step, receive.source), receive.source, receive.target, received),
    )


class _Exchange:
    """A plan under way, transfer by transfer."""

    def __init__(
        self,
        rank: Rank,
        kind: Kind,
        name: str,
        rows: int,
        row_bytes: float,
        schedule: Schedule | None,
        own: Own | None = None,
    ) -> None:
        schedule = schedule or rank.variant.schedule
        assert schedule is not None
        # As the ops do: no more chunks than a block has rows.
        schedule = replace(schedule, chunks=min(schedule.chunks, max(1, rows)))
        self.rank, self.name, self.rows, self.row_bytes = rank, name, rows, row_bytes
        self.plan: Plan = schedule.plan(kind, rank.rank, rank.size, own)
        self.posted: list[tuple[int, ...]] = []
        self.used = 0
        self._prefix = rank.program.unique(name)

    def _bytes(self, piece: Piece) -> float:
        inside = self.plan.inside(piece, self.rows)
        return (inside.stop - inside.start) * self.row_bytes

    def _post(self) -> None:
        step = self.plan.transfers[len(self.posted)]
        assert step.send is not None
        assert step.receive is not None
        sent, received = _messages(
            step, self._prefix, self._bytes(step.send.piece), self._bytes(step.receive.piece)
        )
        origin = self.plan.arrival.get(step.send.piece, -1)
        after = self.posted[origin] if origin >= 0 else ()
        self.posted.append(
            self.rank.program.exchange(
                self.name,
                f"lane {step.send.lane}",
                [sent],
                [received],
                after=after,
                early_receive=True,
            )
        )

    @property
    def _steps(self) -> int:
        return len(self.plan.transfers)


class Gather(_Exchange):
    """Blocks arrive and are used, the own block first.

    Args:
        in_place: whether every message has a place of its own, so that all can be posted at once.
        ahead: how many may be posted at first; each :meth:`advance` adds one.
        schedule: instead of the variant's.
    """

    def __init__(
        self,
        rank: Rank,
        name: str,
        rows: int,
        row_bytes: float,
        *,
        in_place: bool,
        ahead: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(rank, "gather", name, rows, row_bytes, schedule)
        self._in_place = in_place or self.plan.forwards
        self._ahead, self._consumed = ahead, 0
        self._post_all()

    def _post_all(self) -> None:
        limit = self._steps if self._in_place else self._consumed + self.plan.window
        if self._ahead is not None:
            limit = min(limit, self._ahead)
        while len(self.posted) < min(limit, self._steps):
            send = self.plan.transfers[len(self.posted)].send
            assert send is not None
            if self.plan.arrival.get(send.piece, -1) >= self.used:
                break
            self._post()

    def advance(self) -> None:
        """Allow one transfer more; a ring also passes on what has arrived."""
        if self._ahead is not None:
            self._ahead += 1
        if self.plan.forwards and self.used < len(self.posted):
            self.used += 1
        self._post_all()

    def consume(self, work: Work) -> None:
        for step in self.plan.steps:
            after: tuple[int, ...] = ()
            if step.index:
                while self.used < step.index:
                    self.used += 1
                    self._post_all()
                after = self.posted[step.index - 1]
            if step.compute is not None:
                run = self.plan.rows(step.compute, self.rows)
                self.rank.compute(f"{self.name} {step.compute}", work(run), after)
            self._consumed = step.index
            self._post_all()

    def finish(self) -> tuple[int, ...]:
        """Post what is left; returns what to wait for until everything is there."""
        self._ahead = None
        while self.used < self._steps:
            self._consumed = self.used
            self._post_all()
            self.used += 1
        self._post_all()
        return tuple(index for posted in self.posted for index in posted)


class Scatter(_Exchange):
    """Blocks are made and sent, the own block last; partials are added as they are needed.

    Args:
        schedule: instead of the variant's.
        queued: behind other transfers; every piece has a buffer of its own.
    """

    def __init__(
        self,
        rank: Rank,
        name: str,
        rows: int,
        row_bytes: float,
        *,
        schedule: Schedule | None = None,
        queued: bool = False,
    ) -> None:
        super().__init__(rank, "reduce_scatter", name, rows, row_bytes, schedule)
        self._window = self._steps if queued else self.plan.window
        self._registered = min(self._steps, self._window)

    def _add(self, position: int) -> None:
        receive = self.plan.transfers[position].receive
        assert receive is not None
        seconds = self.rank.machine.memory(3 * self._bytes(receive.piece))
        self.rank.compute(f"{self.name} sum", seconds, self.posted[position])

    def _use(self) -> None:
        receive = self.plan.transfers[self.used].receive
        assert receive is not None
        # What a ring passes on was added when it was passed on.
        if not self.plan.forwards or receive.piece.target == self.plan.rank:
            self._add(self.used)
        self.used += 1
        self._registered = min(self._steps, self.used + self._window)

    def produce(self, work: Work, between: Callable[[], None] | None = None) -> None:
        window = self._window
        for step in self.plan.steps:
            piece = step.compute
            if piece is None:
                continue
            sent = len(self.posted)
            after: tuple[int, ...] = ()
            if piece.chunk is not None and sent >= window:
                after = self.posted[sent - window]
            run = self.plan.rows(piece, self.rows)
            self.rank.compute(f"{self.name} {piece}", work(run), after)
            if between is not None:
                between()
            if piece.chunk is None:
                continue
            origin = self.plan.arrival.get(piece) if self.plan.forwards else None
            if origin is not None:
                self._add(origin)
            while self._registered <= sent:
                self._use()
            self._post()

    def finish(self) -> None:
        """Add what has not been added yet."""
        while self.used < self._steps:
            self._use()


class AllToAll(_Exchange):
    """A block for every rank in exchange for one of its; everything that arrives has its place.

    Args:
        own: when the own block is worked on: ``last`` before it is sent, ``first`` when it comes.
    """

    def __init__(
        self, rank: Rank, name: str, rows: int, row_bytes: float, own: Own, schedule: Schedule
    ) -> None:
        super().__init__(rank, "all_to_all", name, rows, row_bytes, schedule, own)

    def produce(self, work: Work) -> None:
        """Make the blocks and send each off, the own one last."""
        for step in self.plan.steps:
            if step.compute is None:
                continue
            run = self.plan.rows(step.compute, self.rows)
            self.rank.compute(f"{self.name} {step.compute}", work(run))
            if step.compute.chunk is not None:
                self._post()

    def consume(self, work: Work) -> None:
        """Use the blocks, the own one first, then as they arrive; posts what is not posted yet."""
        while len(self.posted) < self._steps:
            self._post()
        mine = self.plan.rank
        self._use(Piece(mine, mine, None), work, ())
        for place, step in enumerate(self.plan.transfers):
            assert step.receive is not None
            if step.receive.piece.target == mine:
                self._use(step.receive.piece, work, self.posted[place])

    def _use(self, piece: Piece, work: Work, after: tuple[int, ...]) -> None:
        assert piece.source is not None
        inside, start = self.plan.inside(piece, self.rows), piece.source * self.rows
        run = slice(start + inside.start, start + inside.stop)
        self.rank.compute(f"{self.name} use {piece}", work(run), after)

    def finish(self) -> tuple[int, ...]:
        """What to wait for until everything is there."""
        return tuple(index for posted in self.posted for index in posted)
