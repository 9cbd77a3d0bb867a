"""Blocks computed or used piece by piece: attention, Ulysses, sharded weights, buckets."""

from __future__ import annotations

from typing import Literal

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.rules.pieces import block_of, inside, made_pieces, rows_of, used_pieces
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, Rule
from commfuse_npu.plan.schedule import Own, RankSpec

__all__ = [
    "Blocks",
    "bucket_gather",
    "bucket_scatter",
    "exchange",
    "gather_use",
    "produce_scatter",
    "sharded_backward",
    "sharded_forward",
]

Blocks = Literal["given", "made", "made and kept"]
"""Whether the blocks of an exchange are an input, or are computed piece by piece.

``made`` blocks are in scratch memory until they are sent; ``made and kept`` ones are computed into
a buffer of the operation.
"""


class _Gather:
    """Gathers ``shard`` for work that takes the blocks one by one, the own block first.

    Args:
        window: number of pieces with memory, which is reused after the work on a piece; ``None``
            for memory of the ``whole`` matrix, ``[n * s, columns]``.
    """

    def __init__(self, b: Builder, rows: int, columns: int, window: int | None = None) -> None:
        self._b, self._rows, self._in_place = b, rows, window is None
        runs = b.runs(rows, "first")
        self._pieces = [(run, j, hop) for j, run in enumerate(runs) for hop in b.hops("first")]
        self._chunks, self._posted = len(runs), 0
        self._window = min(window or len(self._pieces), len(self._pieces))
        if window is None:
            b.scratch("whole", b.size * rows, columns)
        else:
            longest = max(run.stop - run.start for run in runs)
            for slot in range(self._window):
                b.scratch(f"arriving {slot}", longest, columns)

    def post(self, upto: int | None = None) -> None:
        """Post until ``upto`` pieces are posted in all; ``None``: as many as have memory."""
        end = min(self._window if upto is None else upto, len(self._pieces))
        for at in range(self._posted, end):
            run, j, hop = self._pieces[at]
            sent = rows_of("shard", run)
            self._b.post(hop, sent, self._there(at), "block {source}", j, self._chunks)
        self._posted = max(self._posted, end)

    def _there(self, at: int) -> Span:
        run, _, hop = self._pieces[at]
        if self._in_place:
            return rows_of("whole", inside(hop.source, self._rows, run))
        return Span(f"arriving {at % self._window}", 0, run.stop - run.start)

    def use(self) -> None:
        """``use(piece, run)`` for the own block and then for every piece in its order."""
        b, rows = self._b, self._rows
        b.compute("use", [], [Span("shard", 0, rows)], block_of(b.rank, rows))
        for at, (run, _, hop) in enumerate(self._pieces):
            b.compute("use", [], [self._there(at)], inside(hop.source, rows, run))
            self.post(at + 1 + self._window)


class _Scatter:
    """Reduce-scatters a matrix piece by piece: each rank sums the pieces of its own block.

    Pieces are computed before they are sent, the own block last, and summed into ``out``; or they
    are rows of ``bucket``, whose own block becomes the sum.

    Args:
        stack: number of partials of a chunk that are added at once.
        in_flight: number of stacks with memory; the others are sent as these are added.
        finish: whether the work ``finish(out, total, own)`` completes the sum, with a wide total;
            not called for one rank, which has nothing to sum.
    """

    def __init__(
        self,
        b: Builder,
        rows: int,
        columns: int,
        stack: int,
        *,
        in_flight: int = IN_FLIGHT,
        finish: bool = False,
        bucket: bool = False,
    ) -> None:
        self._b, self._rows, self._in_flight, self._bucket = b, rows, in_flight, bucket
        runs, hops, stack = b.runs(rows, "last"), b.hops("last"), max(1, min(stack, b.peers))
        self._chunks = len(runs)
        self._stacks = [
            (j, run, hops[at : at + stack], at)
            for j, run in enumerate(runs)
            for at in range(0, len(hops), stack)
        ]
        self._finish = finish and b.peers > 0
        # Partials are added before the own block exists, or in several additions.
        several = stack < b.peers or len(runs) > IN_FLIGHT
        self._total = self._finish or (several and b.peers > 0)
        self._out = rows_of("bucket", block_of(b.rank, rows)) if bucket else Span("out", 0, rows)
        self._own = self._out if bucket else Span("own", 0, rows)
        for t, (_, run, group, _) in enumerate(self._stacks):
            length = len(group) * (run.stop - run.start)
            for name in ("partials",) if bucket else ("made", "partials"):
                b.scratch(f"{name} {t}", length, columns, slot=f"{name} {t % in_flight}")
        if not bucket:
            b.scratch("own", rows, columns)
        if self._total:
            b.scratch("total", rows, columns, wide=True)
        self._sent = self._added = 0

    def send(self, upto: int | None = None) -> None:
        """Compute and send stacks until ``upto``; ``None``: all, and then compute the own block."""
        b, rows = self._b, self._rows
        for t in range(self._sent, len(self._stacks[:upto])):
            j, run, group, _ = self._stacks[t]
            if t >= self._in_flight:
                self._add()
            for at, hop in enumerate(group):
                part = inside(hop.target, rows, run)
                place = block_of(at, run.stop - run.start)
                sent = rows_of("bucket", part) if self._bucket else rows_of(f"made {t}", place)
                if not self._bucket:
                    b.compute("make", [sent], [], part)
                into = rows_of(f"partials {t}", place)
                b.post(hop, sent, into, "partial for {target}", j, self._chunks)
            self._sent = t + 1
        if upto is None and not self._bucket:
            b.compute("make", [self._own], [], block_of(b.rank, rows))

    def _add(self) -> None:
        t, self._added = self._added, self._added + 1
        _, run, group, at = self._stacks[t]
        partials = Span(f"partials {t}", 0, len(group) * (run.stop - run.start)), len(group)
        if self._total:
            total = rows_of("total", run)
            so_far = [(total, 1)] if at else []
            self._b.add(total, *so_far, partials, on_side_stream=not self._bucket)
        else:
            self._b.add(rows_of("out", run), partials, (rows_of("own", run), 1))

    def finish(self) -> None:
        """Add the remaining partials and write the sum."""
        b, total = self._b, Span("total", 0, self._rows)
        while self._added < len(self._stacks):
            self._add()
        if self._bucket:
            b.settle()
        if self._finish:
            b.compute("finish", [self._out], [total, self._own])
        elif self._total:
            b.add(self._out, (total, 1), (self._own, 1))
        elif not self._stacks and not self._bucket:
            b.copy(self._out, self._own)


# ---------------------------------------------------------------------- attention, Ulysses


@Rule
def produce_scatter(spec: RankSpec, rows: int, columns: int) -> Builder:
    """Compute a matrix piece by piece and reduce-scatter it.

    Work: ``make(out, run)``.
    """
    b = Builder(spec)
    scatter = _Scatter(b, rows, columns, b.peers)
    scatter.send()
    scatter.finish()
    return b


@produce_scatter.equals
def _(c: Carrier, rows: int, columns: int) -> None:
    whole = c.make(c.spec.size * rows, columns, made_pieces(c.spec, rows), out=None)
    c.reduce_scatter(whole, out="out")


@Rule
def gather_use(spec: RankSpec, rows: int, columns: int, keep: bool) -> Builder:
    """Gather ``shard`` and use each piece as it arrives; with ``keep``, also the whole at the end.

    Work: ``use(piece, run)``; ``wgrad(whole)``.
    """
    b = Builder(spec)
    gather = _Gather(b, rows, columns)
    gather.post()
    gather.use()
    if keep:
        b.copy(rows_of("whole", block_of(spec.rank, rows)), Span("shard", 0, rows))
        b.compute("wgrad", [], [Span("whole", 0, spec.size * rows)])
    return b


@gather_use.equals
def _(c: Carrier, rows: int, columns: int, keep: bool) -> None:
    whole = c.all_gather(c.given("shard", rows, columns))
    c.use(whole, used_pieces(c.spec, rows), first=block_of(c.spec.rank, rows))
    if keep:
        c.wgrad(whole)


@Rule
def exchange(
    spec: RankSpec, rows: int, columns: int, blocks: Blocks, uses: bool, keep: bool, wgrad: bool
) -> Builder:
    """All-to-all of blocks that are computed, or used, or both, piece by piece.

    The own block is computed last and used first.

    Args:
        blocks: unless ``made``, they are in ``blocks``, a buffer of the operation.
        keep: whether the operation has a buffer ``received`` for the result.

    Work: ``make(out, run)``, ``use(piece, run)``; ``wgrad()``, which needs neither of them and
    overlaps with the last transfers.
    """
    b = Builder(spec)
    makes, staged = blocks != "given", blocks == "made"
    order: Own = "last" if makes else "first"
    own, runs = block_of(spec.rank, rows), spec.schedule.runs(rows, order)
    if not keep:
        b.scratch("received", spec.size * rows, columns)
    for j, run in enumerate(runs):
        length = run.stop - run.start
        if staged:
            b.scratch(f"made {j}", b.peers * length, columns, slot=f"made {j % IN_FLIGHT}")
        for at, hop in enumerate(b.hops(order)):
            part = inside(hop.target, rows, run)
            out = rows_of(f"made {j}", block_of(at, length)) if staged else rows_of("blocks", part)
            if makes:
                b.compute("make", [out], [], part)
            into = rows_of("received", inside(hop.source, rows, run))
            b.post(hop, out, into, "block {source} for {target}", j, len(runs))
    own_block = rows_of("received" if staged else "blocks", own)
    if makes:
        b.compute("make", [own_block], [], own)
    if wgrad:
        b.compute("wgrad")
    if keep and not staged:
        b.copy(rows_of("received", own), own_block)
    if uses:
        b.compute("use", [], [own_block], own)
        for run in runs:
            for hop in b.hops(order):
                part = inside(hop.source, rows, run)
                b.compute("use", [], [rows_of("received", part)], part)
    return b


@exchange.equals
def _(
    c: Carrier, rows: int, columns: int, blocks: Blocks, uses: bool, keep: bool, wgrad: bool
) -> None:
    total, makes = c.spec.size * rows, blocks != "given"
    if makes:
        out = "blocks" if blocks == "made and kept" else None
        sent = c.make(total, columns, made_pieces(c.spec, rows), out=out)
    else:
        sent = c.given("blocks", total, columns)
    received = c.all_to_all(sent, out="received" if keep else None)
    if wgrad:
        c.wgrad()
    if uses:
        c.use(received, used_pieces(c.spec, rows, "last" if makes else "first"))


# ---------------------------------------------------------------------- sharded weights


def _under_way(b: Builder, rows: int, own: Own) -> int:
    """Number of pieces of a sharded weight with memory: two blocks, or one more than lanes."""
    longest = max(run.stop - run.start for run in b.runs(rows, own))
    return max(2 * rows // longest, b.spec.schedule.lanes_for(b.size) + 1)


@Rule
def sharded_forward(spec: RankSpec, rows: int, columns: int) -> Builder:
    """Gather a weight from its ``shard`` and use it block by block, without memory for all of it.

    Work: ``use(piece, run)``.
    """
    b = Builder(spec)
    gather = _Gather(b, rows, columns, _under_way(b, rows, "first"))
    gather.post()
    gather.use()
    return b


@sharded_forward.equals
def _(c: Carrier, rows: int, columns: int) -> None:
    gather_use.lines(c, rows, columns, False)


@Rule
def sharded_backward(
    spec: RankSpec, rows: int, columns: int, gathers: bool, scatters: bool
) -> Builder:
    """Compute and reduce-scatter the gradient of a sharded weight; gather and use the weight.

    Work: ``make(out, run)``, ``finish(out, total, own)``, ``use(piece, run)``.
    """
    b = Builder(spec)
    gather = _Gather(b, rows, columns, _under_way(b, rows, "first")) if gathers else None
    if gather is not None:
        gather.post()
    scatter = None
    if scatters:
        stack = -(-_under_way(b, rows, "last") // IN_FLIGHT)
        scatter = _Scatter(b, rows, columns, stack, finish=True)
        scatter.send()
    if gather is not None:
        gather.use()
    if scatter is not None:
        scatter.finish()
    return b


@sharded_backward.equals
def _(c: Carrier, rows: int, columns: int, gathers: bool, scatters: bool) -> None:
    if scatters:
        gradient = c.make(c.spec.size * rows, columns, made_pieces(c.spec, rows), out=None)
        c.reduce_scatter(gradient, out="out", finish=True)
    if gathers:
        whole = c.all_gather(c.given("shard", rows, columns))
        first = None if scatters else block_of(c.spec.rank, rows)
        c.use(whole, used_pieces(c.spec, rows), first=first)


# ---------------------------------------------------------------------- buckets


@Rule
def bucket_scatter(spec: RankSpec, rows: int, stack: int, in_flight: int) -> Builder:
    """Reduce-scatter ``bucket``, gradients of several layers, in place.

    Args:
        rows: elements of a shard.
        stack, in_flight: see :class:`_Scatter`.

    Work: ``finish(out, total, own)``.  Run ahead, it posts all transfers that have memory.
    """
    b = Builder(spec)
    scatter = _Scatter(b, rows, 1, stack, in_flight=in_flight, finish=True, bucket=True)
    scatter.send(in_flight)
    b.end_ahead()
    scatter.send()
    scatter.finish()
    return b


@bucket_scatter.equals
def _(c: Carrier, rows: int, stack: int, in_flight: int) -> None:
    c.reduce_scatter(c.given("bucket", c.spec.size * rows, 1), out="bucket", finish=True)


@Rule
def bucket_gather(spec: RankSpec, rows: int) -> Builder:
    """All-gather the shards of ``bucket``, parameters of several layers, in place.

    Args:
        rows: elements of a shard.

    Run ahead, it posts all its transfers.
    """
    b = Builder(spec)
    runs = b.runs(rows, "first")
    for j, run in enumerate(runs):
        for hop in b.hops("first"):
            own, peer = (inside(rank, rows, run) for rank in (spec.rank, hop.source))
            sent, into = rows_of("bucket", own), rows_of("bucket", peer)
            b.post(hop, sent, into, "block {source}", j, len(runs))
    b.end_ahead()
    return b


@bucket_gather.equals
def _(c: Carrier, rows: int) -> None:
    bucket = c.given("bucket", c.spec.size * rows, 1)
    c.all_gather(c.own_block(bucket), out="bucket")
