"""Tensor-parallel linear layers: chunk j of all peers is one GEMM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Span
from commfuse_npu.plan.rules.pieces import (
    arrivals_of,
    block_of,
    departures_of,
    gather_pieces,
    inside,
    parts_of,
    peers_of,
    rows_of,
    scatter_pieces,
    sides_of,
    sum_pieces,
)
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, rule
from commfuse_npu.plan.schedule import Hop, Place

__all__ = ["Wgrad", "column_backward", "gather_gemm", "gemm_all_reduce", "gemm_scatter"]

Wgrad = Literal["whole", "blocks"]
"""How a weight gradient is made from blocks of rows.

``whole`` waits for all rows and runs one GEMM: the bits of the unfused layer.  ``blocks`` runs a
GEMM per piece as it arrives and sums in fp32: more work to hide transfers behind, but another order
of additions.
"""

_AHEAD = 8
"""Transfers that are posted before the first work: each takes the host some time."""


@rule
def gather_gemm(
    place: Place, rows: int, inputs: int, outputs: int, keep: bool, wgrad: Wgrad | None, other: int
) -> Builder:
    """Gather ``shard``, multiply it by ``weight``; the gathered matrix may be a factor of a wgrad.

    Args:
        outputs: 0 for no product.
        keep: the operation brings ``whole`` along, to be filled.
        other: columns of ``other``.

    Work: ``gemm(out, a, b)``; ``wgrad(whole rows, other rows)``.

    With one chunk blocks arrive in place, and the rows before and after the own ones are a GEMM
    each, or each block is if one lane brings them one by one; with one peer chunks arrive in place.
    Else a chunk of all peers is staged, multiplied, and its result copied into place.  A chunk is
    posted before the one that it follows is used, so that the host is not late with the work.
    """
    b = Builder(place)
    runs, n, r = b.runs(rows, "first"), place.size, place.rank
    own, peers, chunks = block_of(r, rows), peers_of(place), len(runs)
    # Chunks of several blocks are no run of rows.
    in_place, filled = chunks == 1 or b.peers <= 1, keep or wgrad == "whole"
    if (in_place or filled) and not keep:
        b.scratch("whole", n * rows, inputs)
    if not in_place:
        for j, run in enumerate(runs):
            b.scratch(f"staged {j}", b.peers * (run.stop - run.start), inputs)
    ahead = max(1, _AHEAD // max(1, b.peers)) if place.batched else chunks

    def post(j: int) -> None:
        if j < chunks:
            for hop in b.hops("first"):
                into = rows_of("whole", inside(hop.source, rows, runs[j]))
                if not in_place:
                    place_of = block_of(peers.index(hop.source), runs[j].stop - runs[j].start)
                    into = rows_of(f"staged {j}", place_of)
                b.post(hop, rows_of("shard", runs[j]), into, "block {source}", j, chunks)

    for j in range(ahead):
        post(j)
    weight = Span("weight", 0, inputs)

    def use(piece: Span, out: Span, factor: Span | None) -> None:
        if outputs:
            b.compute("gemm", [out], [piece, weight])
        if factor is not None:
            b.compute("wgrad", [], [piece, factor])

    by_blocks = wgrad == "blocks"
    use(Span("shard", 0, rows), rows_of("out", own), rows_of("other", own) if by_blocks else None)
    if ahead < 2:
        post(1)
    if filled:
        b.copy(rows_of("whole", own), Span("shard", 0, rows), aside=True)
    for j, run in enumerate(runs):
        if j + 1 >= max(2, ahead):
            post(j + 1)
        length = run.stop - run.start
        if in_place:
            for side in arrivals_of(place):
                there = slice(side[0] * rows + run.start, side[-1] * rows + run.stop)
                factor = rows_of("other", there) if by_blocks else None
                use(rows_of("whole", there), rows_of("out", there), factor)
            continue
        staged = Span(f"staged {j}", 0, b.peers * length)
        if filled:
            _spread(b, "whole", staged, run, rows, aside=True)
        factor = None
        if by_blocks:
            b.scratch(f"factor {j}", b.peers * length, other, slot="factor")
            factor = Span(f"factor {j}", 0, b.peers * length)
            for strip, part in _strips(place, "other", factor, run, rows):
                b.copy(part, strip)
        if outputs:
            b.scratch(f"result {j}", b.peers * length, outputs, slot=f"result {j % 2}")
        result = Span(f"result {j}", 0, b.peers * length)
        use(staged, result, factor)
        if outputs:
            _spread(b, "out", result, run, rows, aside=j < chunks - 1)
    if wgrad == "whole":
        b.compute("wgrad", [], [Span("whole", 0, n * rows), Span("other", 0, n * rows)])
    return b


@gather_gemm.equals
def _(
    c: Carrier, rows: int, inputs: int, outputs: int, keep: bool, wgrad: Wgrad | None, other: int
) -> None:
    own, pieces = block_of(c.place.rank, rows), gather_pieces(c.place, rows)
    whole = c.all_gather(c.given("shard", rows, inputs), out="whole" if keep else None)
    if outputs:
        weight, gemms = c.given("weight", inputs, outputs), [(runs, None) for runs in pieces]
        c.gemm(whole, weight, gemms, out="out", first=own)
    if wgrad:
        factors = whole, c.given("other", c.place.size * rows, other)
        by_blocks = wgrad == "blocks"
        c.wgrad(*factors, pieces=pieces if by_blocks else None, first=own if by_blocks else None)


def _strips(
    place: Place, buffer: str, stack: Span, run: slice, rows: int
) -> list[tuple[Span, Span]]:
    """The rows ``run`` of each peer's block, and where they are in a stack of all peers."""
    length, found, at = run.stop - run.start, [], stack.start
    for side in sides_of(place):
        first = side[0] * rows
        there = Span(buffer, first + run.start, first + run.stop, None, len(side), rows)
        found.append((there, Span(stack.buffer, at, at + len(side) * length)))
        at += len(side) * length
    return found


def _spread(b: Builder, buffer: str, stack: Span, run: slice, rows: int, *, aside: bool) -> None:
    """Copy a stack of all peers' chunk into their blocks."""
    for there, part in _strips(b.place, buffer, stack, run, rows):
        b.copy(there, part, aside=aside)


@rule
def gemm_scatter(place: Place, rows: int, inputs: int, outputs: int) -> Builder:
    """Multiply ``a`` by ``weight`` and reduce-scatter the product.

    Work: ``gemm(out, a, b)``.

    The *columns* are cut into chunks, so that a GEMM over all rows makes contiguous pieces for all
    peers; only the last group of columns is cut by rows, the own ones last: into those before and
    after them, or with one lane and one group into blocks.  Two groups are under way at once.
    """
    b = Builder(place)
    groups = b.runs(outputs, "last")
    scatter = _ColumnScatter(b, rows, groups, "out", in_flight=IN_FLIGHT)
    everything = slice(0, place.size * rows)
    for j, columns in enumerate(groups):
        if j >= IN_FLIGHT:
            scatter.add(j - IN_FLIGHT, aside=True)
        if j < len(groups) - 1:
            _gemm(b, scatter.made(j), everything, inputs, columns)
            scatter.post(j)
        else:
            for hop, piece in _together(b, rows, departures_of(place, len(groups))):
                if piece is not None:
                    _gemm(b, scatter.made(j), piece, inputs, columns)
                scatter.post_one(j, hop)
            _gemm(b, scatter.made(j), block_of(place.rank, rows), inputs, columns)
    for j in range(max(0, len(groups) - IN_FLIGHT), len(groups)):
        scatter.add(j, aside=j < len(groups) - 1)
    return b


@gemm_scatter.equals
def _(c: Carrier, rows: int, inputs: int, outputs: int) -> None:
    a, weight = c.given("a", c.place.size * rows, inputs), c.given("weight", inputs, outputs)
    pieces = scatter_pieces(c.place, rows, outputs)
    product = c.gemm(a, weight, pieces, last=block_of(c.place.rank, rows))
    c.reduce_scatter(product, out="out")


def _together(b: Builder, rows: int, blocks: Sequence[range]) -> Iterator[tuple[Hop, slice | None]]:
    """The peers as they are sent to, the first of some blocks with the rows of all of them."""
    left = list(blocks)
    for hop in b.hops("last"):
        side = next((side for side in left if hop.target in side), None)
        if side is None:
            yield hop, None
        else:
            left.remove(side)
            yield hop, slice(side[0] * rows, (side[-1] + 1) * rows)


def _gemm(b: Builder, made: str, piece: slice, inputs: int, columns: slice) -> None:
    weight = Span("weight", 0, inputs, (columns.start, columns.stop))
    b.compute("gemm", [rows_of(made, piece)], [rows_of("a", piece), weight])


class _ColumnScatter:
    """Groups of columns of a product on their way to the ranks of their rows.

    Args:
        out: the buffer of the sums.
        in_flight: how many groups have memory of their own.
    """

    def __init__(
        self, b: Builder, rows: int, groups: list[slice], out: str, in_flight: int
    ) -> None:
        self._b, self._rows, self._groups, self._out = b, rows, groups, out
        self._whole = len(groups) == 1
        for j, columns in enumerate(groups):
            slot, width = j % in_flight, columns.stop - columns.start
            b.scratch(self.made(j), b.size * rows, width, slot=f"made {slot}")
            b.scratch(self._slab(j), b.peers * rows, width, slot=f"slab {slot}")

    def made(self, j: int) -> str:
        """The buffer of a group's product, ``[n * s, width]``."""
        return f"product {j}"

    def _slab(self, j: int) -> str:
        return f"partials {j}"

    def post(self, j: int) -> None:
        for hop in self._b.hops("last"):
            self.post_one(j, hop)

    def post_one(self, j: int, hop: Hop) -> None:
        rows, chunks = self._rows, len(self._groups)
        # One below the other in the order in which they are added.
        into = rows_of(self._slab(j), block_of(self._b.hops("last").index(hop), rows))
        made = rows_of(self.made(j), block_of(hop.target, rows))
        self._b.post(hop, made, into, "partial for {target}", j, chunks)

    def add(self, j: int, *, aside: bool) -> None:
        b, rows, columns = self._b, self._rows, self._groups[j]
        out = Span(self._out, 0, rows, None if self._whole else (columns.start, columns.stop))
        own = rows_of(self.made(j), block_of(b.rank, rows))
        terms = [(Span(self._slab(j), 0, b.peers * rows), b.peers)] if b.peers else []
        b.add(out, *terms, (own, 1), aside=aside)


@rule
def column_backward(
    place: Place,
    rows: int,
    inputs: int,
    outputs: int,
    scatters: bool,
    gathers: bool,
    wgrad: bool,
) -> Builder:
    """The gradients of ``all_gather(x) @ weight^T``: dgrad to its ranks, and x again for wgrad.

    Args:
        inputs: columns of ``x``.
        outputs: columns of ``grad``, ``[n * s, outputs]``.

    Work: ``gemm(out, a, b)``; ``wgrad(grad rows, whole rows)``.

    Begun ahead, it has x under way.  The whole dgrad is made in groups of columns, while x arrives;
    its sums travel behind wgrad and are added after it.

    A group of columns of the weight is neither contiguous nor the transpose of a contiguous matrix,
    so aclnn copies it before the GEMM (read in ``ContiguousAndCast`` of CANN's ops-nn): one copy of
    the weight per backward, which the simulator charges.  Groups of rows need no copy, but blocks
    of ``grad`` as groups leave links idle, and a chunk of every block is a GEMM per peer.
    """
    b = Builder(place)
    n, r = place.size, place.rank
    if gathers:
        b.scratch("whole", n * rows, inputs)
        for hop in b.hops("first"):
            into = rows_of("whole", block_of(hop.source, rows))
            b.post(hop, Span("x", 0, rows), into, "block {source}")
        b.mark()
    groups = b.runs(inputs, "last") if scatters else []
    scatter = _ColumnScatter(b, rows, groups, "grad_x", in_flight=len(groups))
    for j, columns in enumerate(groups):
        weight = Span("weight", 0, outputs, (columns.start, columns.stop))
        everything = slice(0, n * rows)
        b.compute(
            "gemm", [rows_of(scatter.made(j), everything)], [rows_of("grad", everything), weight]
        )
        scatter.post(j)
    if wgrad:
        if gathers:
            b.copy(rows_of("whole", block_of(r, rows)), Span("x", 0, rows), aside=True)
        b.compute("wgrad", [], [Span("grad", 0, n * rows), Span("whole", 0, n * rows)])
    for j in range(len(groups)):
        scatter.add(j, aside=wgrad or j < len(groups) - 1)
    return b


@column_backward.equals
def _(
    c: Carrier,
    rows: int,
    inputs: int,
    outputs: int,
    scatters: bool,
    gathers: bool,
    wgrad: bool,
) -> None:
    everything = slice(0, c.place.size * rows)
    grad = c.given("grad", everything.stop, outputs)
    # In Megatron's order: x arrives behind dgrad, whose sum travels behind wgrad (read in
    # Megatron-Core's LinearWithGradAccumulationAndAsyncCommunication).
    whole = c.all_gather(c.given("x", rows, inputs)) if gathers else None
    if scatters:
        runs = c.place.schedule.runs(inputs, "last")
        pieces = [((everything,), columns) for columns in runs]
        dgrad = c.gemm(grad, c.given("weight", outputs, inputs), pieces)
        c.reduce_scatter(dgrad, out="grad_x")
    if wgrad:
        c.wgrad(grad, whole if gathers else c.given("whole", everything.stop, inputs))


@rule
def gemm_all_reduce(place: Place, rows: int, inputs: int, outputs: int) -> Builder:
    """Multiply ``a`` by ``weight`` and sum the product over the ranks.

    Args:
        rows: of all ranks together, a multiple of the group size.

    Work: ``gemm(out, a, b)``.

    The rows are cut into parts.  Rank r sums block r of each part and sends the sum to all others,
    while the next part is made; the last part is cut, its own block last.
    """
    b = Builder(place)
    r, parts = place.rank, parts_of(place, rows)
    weight = Span("weight", 0, inputs)

    def gemm(p: int, piece: slice) -> None:
        made = rows_of(f"product {p}", piece)
        part = slice(parts[p].start + piece.start, parts[p].start + piece.stop)
        b.compute("gemm", [made], [rows_of("a", part), weight])

    def finish(p: int) -> None:
        """Sum the own block of a part, and send the sum around."""
        block = (parts[p].stop - parts[p].start) // place.size
        start = parts[p].start
        mine = Span("out", start + r * block, start + (r + 1) * block)
        terms = [(Span(f"partials {p}", 0, b.peers * block), b.peers)] if b.peers else []
        b.add(mine, *terms, (rows_of(f"product {p}", block_of(r, block)), 1))
        for hop in b.hops("first"):
            theirs = Span("out", start + hop.source * block, start + (hop.source + 1) * block)
            b.post(hop, mine, theirs, "sum {source}", p, len(parts))

    for p, part in enumerate(parts):
        length, last = part.stop - part.start, p == len(parts) - 1
        block = length // place.size
        b.scratch(f"product {p}", length, outputs, slot=f"product in {p % 2}")
        b.scratch(f"partials {p}", b.peers * block, outputs, slot=f"partials in {p % 2}")
        if not last:
            gemm(p, slice(0, length))
        for at, (hop, piece) in enumerate(_together(b, block, departures_of(place, 1))):
            if last and piece is not None:
                gemm(p, piece)
            made = rows_of(f"product {p}", block_of(hop.target, block))
            into = rows_of(f"partials {p}", block_of(at, block))
            b.post(hop, made, into, "partial for {target}", p, len(parts))
        if last:
            gemm(p, block_of(r, block))
        if p:
            finish(p - 1)
    finish(len(parts) - 1)
    return b


@gemm_all_reduce.equals
def _(c: Carrier, rows: int, inputs: int, outputs: int) -> None:
    a, weight = c.given("a", rows, inputs), c.given("weight", inputs, outputs)
    pieces = sum_pieces(c.place, rows)
    product = c.gemm(a, weight, pieces, last=pieces[-1][0][0])
    c.all_reduce(product, parts_of(c.place, rows), out="out")
