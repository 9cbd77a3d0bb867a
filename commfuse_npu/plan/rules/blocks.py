"""Blocks that are made, or used, piece by piece: attention, Ulysses."""

from __future__ import annotations

from typing import Literal

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Span
from commfuse_npu.plan.rules.pieces import (
    block_of,
    inside,
    made_pieces,
    rows_of,
    stacks_of,
    swapped_pieces,
    used_pieces,
)
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, rule
from commfuse_npu.plan.schedule import Own, Place

__all__ = [
    "Blocks",
    "GatherPieces",
    "ScatterPieces",
    "exchange",
    "gather_use",
    "produce_scatter",
]

Blocks = Literal["given", "made", "made and kept"]
"""Whether an exchange has its blocks to send, or makes them piece by piece.

Blocks that are ``made`` are in scratch memory until they are sent; those that are kept as well are
made in place, in a buffer that the operation brings along.
"""


class GatherPieces:
    """Blocks on their way to a consumer that takes them one by one, the own block first.

    Args:
        whole: the buffer of all blocks, ``[n * s, columns]``; ``None`` for ``window`` pieces of
            scratch, each used again when its piece is.
    """

    def __init__(
        self, b: Builder, rows: int, columns: int, shard: str, whole: str | None, window: int
    ) -> None:
        self._b, self._rows, self._shard, self._whole = b, rows, shard, whole
        chunks = b.runs(rows, "first")
        self._pieces = [(run, j, hop) for j, run in enumerate(chunks) for hop in b.hops("first")]
        self._chunks = len(chunks)
        self._window = len(self._pieces) if whole else min(window, len(self._pieces))
        self._posted = 0
        if whole is None:
            longest = max(run.stop - run.start for run in chunks)
            for slot in range(self._window):
                b.scratch(f"arriving {slot}", longest, columns)

    def post(self, upto: int | None = None) -> None:
        """Post so many, all for which there is memory if ``None``."""
        upto = self._window if upto is None else min(upto, self._window)
        while self._posted < upto:
            self._post()

    def _post(self) -> None:
        run, j, hop = self._pieces[self._posted]
        there = self._there(self._posted)
        self._b.post(hop, rows_of(self._shard, run), there, "block {source}", j, self._chunks)
        self._posted += 1

    def _there(self, at: int) -> Span:
        run, _, hop = self._pieces[at]
        if self._whole:
            return rows_of(self._whole, inside(hop.source, self._rows, run))
        return Span(f"arriving {at % self._window}", 0, run.stop - run.start)

    def use(self, work: str = "use") -> None:
        """``work(piece, run)`` for the own block and then for every piece in its order."""
        b, rows = self._b, self._rows
        b.compute(work, [], [Span(self._shard, 0, rows)], block_of(b.rank, rows))
        for at, (run, _, hop) in enumerate(self._pieces):
            b.compute(work, [], [self._there(at)], inside(hop.source, rows, run))
            if self._posted < len(self._pieces):
                self._post()


class ScatterPieces:
    """Pieces that are made one by one, the own block last, and summed by the ranks of their rows.

    Args:
        stack: how many partials are added at once, two stacks being under way.
        finish: let the operation end the sum with ``finish(out, total, own)``, a wide total; not
            for one rank, which has nothing to sum.
    """

    def __init__(
        self, b: Builder, rows: int, columns: int, stack: int, finish: bool, out: str = "out"
    ) -> None:
        self._b, self._rows, self._out = b, rows, out
        self._chunks = b.runs(rows, "last")
        stack = max(1, min(stack, b.peers))
        self._finish = finish
        # Added before the own block is made, or in more than one go.
        many = stack < b.peers or len(self._chunks) > IN_FLIGHT
        self._total = b.peers > 0 and (finish or many)
        self._stacks = stacks_of(self._chunks, b.hops("last"), stack)
        for t, (_, run, some, _) in enumerate(self._stacks):
            length = len(some) * (run.stop - run.start)
            b.scratch(f"made {t}", length, columns, slot=f"made {t % IN_FLIGHT}")
            b.scratch(f"partials {t}", length, columns, slot=f"partials {t % IN_FLIGHT}")
        b.scratch("own", rows, columns)
        if self._total:
            b.scratch("total", rows, columns, wide=True)
        self._added = 0

    def make(self, work: str = "make") -> None:
        """``work(out, run)`` for every piece, sent as soon as it is made, and for the own block."""
        b, rows = self._b, self._rows
        for t, (j, run, some, _) in enumerate(self._stacks):
            if t >= IN_FLIGHT:
                self._add()
            for at, hop in enumerate(some):
                place = block_of(at, run.stop - run.start)
                made, partial = (rows_of(f"{what} {t}", place) for what in ("made", "partials"))
                b.compute(work, [made], [], inside(hop.target, rows, run))
                b.post(hop, made, partial, "partial for {target}", j, len(self._chunks))
        b.compute(work, [Span("own", 0, rows)], [], block_of(b.rank, rows))

    def _add(self) -> None:
        t, self._added = self._added, self._added + 1
        _, run, some, at = self._stacks[t]
        partials = Span(f"partials {t}", 0, len(some) * (run.stop - run.start)), len(some)
        if not self._total:
            self._b.add(rows_of(self._out, run), partials, (rows_of("own", run), 1))
        elif at == 0:
            self._b.add(rows_of("total", run), partials, aside=True)
        else:
            so_far = rows_of("total", run), 1
            self._b.add(rows_of("total", run), so_far, partials, aside=True)

    def finish(self) -> None:
        """Add what has not been added."""
        while self._added < len(self._stacks):
            self._add()
        out, total, own = (Span(name, 0, self._rows) for name in (self._out, "total", "own"))
        if not self._stacks:
            self._b.copy(out, own)
        elif self._finish:
            self._b.compute("finish", [out], [total, own])
        elif self._total:
            self._b.add(out, (total, 1), (own, 1))


@rule
def produce_scatter(place: Place, rows: int, columns: int) -> Builder:
    """Make each rank's piece of a matrix and reduce-scatter it.

    Work: ``make(out, run)``.
    """
    b = Builder(place)
    scatter = ScatterPieces(b, rows, columns, b.peers, finish=False)
    scatter.make()
    scatter.finish()
    return b


@produce_scatter.equals
def _(c: Carrier, rows: int, columns: int) -> None:
    whole = c.make(c.place.size * rows, columns, made_pieces(c.place, rows), out=None)
    c.reduce_scatter(whole, out="out")


@rule
def gather_use(place: Place, rows: int, columns: int, keep: bool) -> Builder:
    """Gather ``shard`` and use each piece as it arrives; with ``keep`` the whole as well.

    Work: ``use(piece, run)``; ``wgrad(whole)``.
    """
    b = Builder(place)
    b.scratch("whole", place.size * rows, columns)
    gather = GatherPieces(b, rows, columns, "shard", "whole", 0)
    gather.post()
    gather.use()
    if keep:
        b.copy(rows_of("whole", block_of(place.rank, rows)), Span("shard", 0, rows))
        b.compute("wgrad", [], [Span("whole", 0, place.size * rows)])
    return b


@gather_use.equals
def _(c: Carrier, rows: int, columns: int, keep: bool) -> None:
    whole = c.all_gather(c.given("shard", rows, columns))
    c.use(whole, used_pieces(c.place, rows), first=block_of(c.place.rank, rows))
    if keep:
        c.wgrad(whole)


@rule
def exchange(
    place: Place, rows: int, columns: int, blocks: Blocks, uses: bool, keep: bool, wgrad: bool
) -> Builder:
    """All-to-all of blocks that are made, or used, or both, piece by piece.

    The own block is the last to be made and the first to be used.

    Args:
        blocks: given or kept, they are ``blocks``, which the operation brings along.
        keep: the operation brings ``received`` along, to be filled.

    Work: ``make(out, run)``, ``use(piece, run)``; ``wgrad()``, which is made of neither and has the
    last transfers to hide.
    """
    b = Builder(place)
    makes, staged = blocks != "given", blocks == "made"
    order: Own = "last" if makes else "first"
    own, runs = block_of(place.rank, rows), place.schedule.runs(rows, order)
    if not keep:
        b.scratch("received", place.size * rows, columns)
    for j, run in enumerate(runs):
        length = run.stop - run.start
        if staged:
            b.scratch(f"made {j}", b.peers * length, columns, slot=f"made {j % IN_FLIGHT}")
        for at, hop in enumerate(b.hops(order)):
            there = inside(hop.target, rows, run)
            out = rows_of(f"made {j}", block_of(at, length)) if staged else rows_of("blocks", there)
            if makes:
                b.compute("make", [out], [], there)
            into = rows_of("received", inside(hop.source, rows, run))
            b.post(hop, out, into, "block {source} for {target}", j, len(runs))
    mine = rows_of("received" if staged else "blocks", own)
    if makes:
        b.compute("make", [mine], [], own)
    if wgrad:
        b.compute("wgrad")
    if keep and not staged:
        b.copy(rows_of("received", own), mine)
    if uses:
        b.compute("use", [], [mine], own)
        for run in runs:
            for hop in b.hops(order):
                there = inside(hop.source, rows, run)
                b.compute("use", [], [rows_of("received", there)], there)
    return b


@exchange.equals
def _(
    c: Carrier, rows: int, columns: int, blocks: Blocks, uses: bool, keep: bool, wgrad: bool
) -> None:
    total, makes = c.place.size * rows, blocks != "given"
    if makes:
        out = "blocks" if blocks == "made and kept" else None
        sent = c.make(total, columns, made_pieces(c.place, rows), out=out)
    else:
        sent = c.given("blocks", total, columns)
    received = c.all_to_all(sent, out="received" if keep else None)
    if wgrad:
        c.wgrad()
    if uses:
        c.use(received, swapped_pieces(c.place, rows, "last" if makes else "first"))
