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
    Else a chunk of all peers is staged, multiplied, and its result copied into place; one that a
    collective brings has the own rows between those of the peers, and is two GEMMs.  A chunk is
    posted before the one that it follows is used, so that the host is not late with the work.
    """
    b = Builder(place)
    runs, n, r = b.runs(rows, "first"), place.size, place.rank
    own, peers, chunks = block_of(r, rows), peers_of(place), len(runs)
    # Chunks of several blocks are no run of rows.
    in_place = chunks == 1 or (b.peers <= 1 and not b.together)
    filled, stacked = keep or wgrad == "whole", b.size if b.together else b.peers
    if (in_place or filled) and not keep:
        b.scratch("whole", n * rows, inputs)
    if not in_place:
        for j, run in enumerate(runs):
            b.scratch(f"staged {j}", stacked * (run.stop - run.start), inputs)
    each = 1 if b.together else max(1, b.peers)
    ahead = max(1, _AHEAD // each) if place.batched else chunks

    def post(j: int) -> None:
        if j < chunks and b.together:
            length = n * (runs[j].stop - runs[j].start)
            there = Span("whole" if in_place else f"staged {j}", 0, length)
            b.collective(
                "all_gather", rows_of("shard", runs[j]), there, "block {source}", j, chunks
            )
        elif j < chunks:
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
    if filled and not (b.together and in_place):
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
        staged, result = f"staged {j}", f"result {j}"
        if filled:
            _spread(b, "whole", staged, run, rows, aside=True)
        if by_blocks:
            b.scratch(f"factor {j}", stacked * length, other, slot="factor")
            for strip, part in _strips(b, "other", f"factor {j}", run, rows):
                b.copy(part, strip)
        if outputs:
            b.scratch(result, stacked * length, outputs, slot=f"result {j % 2}")
        pieces = [slice(0, b.peers * length)]
        if b.together:
            pieces = [slice(side[0] * length, (side[-1] + 1) * length) for side in sides_of(place)]
        for piece in pieces:
            use(
                rows_of(staged, piece),
                rows_of(result, piece),
                rows_of(f"factor {j}", piece) if by_blocks else None,
            )
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


def _strips(b: Builder, buffer: str, stack: str, run: slice, rows: int) -> list[tuple[Span, Span]]:
    """The rows ``run`` of each peer's block, and where they are in a stack of all of them."""
    length, found, at = run.stop - run.start, [], 0
    for side in sides_of(b.place):
        first = side[0] * rows
        there = Span(buffer, first + run.start, first + run.stop, None, len(side), rows)
        at = side[0] * length if b.together else at
        found.append((there, Span(stack, at, at + len(side) * length)))
        at += len(side) * length
    return found


def _spread(b: Builder, buffer: str, stack: str, run: slice, rows: int, *, aside: bool) -> None:
    """Copy a stack of all peers' chunk into their blocks."""
    for there, part in _strips(b, buffer, stack, run, rows):
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
    scatter = _ColumnScatter(b, rows, groups, "out", in_flight=IN_FLIGHT, own_last=True)
    everything = slice(0, place.size * rows)
    for j, columns in enumerate(groups):
        if j >= IN_FLIGHT:
            scatter.add(j - IN_FLIGHT, aside=True)
        if j < len(groups) - 1:
            _gemm(b, scatter.made(j, everything), everything, inputs, columns)
            scatter.post(j)
        else:
            for hop, piece in _in_turn(b, rows, departures_of(place, len(groups))):
                if piece is not None:
                    _gemm(b, scatter.made(j, piece), piece, inputs, columns)
                if not b.together:
                    scatter.post_one(j, hop)
            if b.together:
                scatter.post(j)
            own = block_of(place.rank, rows)
            _gemm(b, scatter.made(j, own), own, inputs, columns)
    for j in range(max(0, len(groups) - IN_FLIGHT), len(groups)):
        scatter.add(j, aside=j < len(groups) - 1)
    return b


@gemm_scatter.equals
def _(c: Carrier, rows: int, inputs: int, outputs: int) -> None:
    a, weight = c.given("a", c.place.size * rows, inputs), c.given("weight", inputs, outputs)
    pieces = scatter_pieces(c.place, rows, outputs)
    product = c.gemm(a, weight, pieces, last=block_of(c.place.rank, rows))
    c.reduce_scatter(product, out="out")


def _in_turn(b: Builder, rows: int, blocks: Sequence[range]) -> Iterator[tuple[Hop, slice | None]]:
    """The peers as they are sent to, the first of some blocks with the rows of all of them."""
    left = list(blocks)
    for hop in b.hops("last"):
        side = next((side for side in left if hop.target in side), None)
        if side is None:
            yield hop, None
        else:
            left.remove(side)
            yield hop, slice(side[0] * rows, (side[-1] + 1) * rows)


def _gemm(b: Builder, made: Span, piece: slice, inputs: int, columns: slice) -> None:
    weight = Span("weight", 0, inputs, (columns.start, columns.stop))
    b.compute("gemm", [made], [rows_of("a", piece), weight])


def _own_below(b: Builder, rows: int, piece: slice) -> slice:
    """Where rows of all ranks are if the peers' come first, which are sent before the own."""
    own = block_of(b.rank, rows)
    if piece == own:
        return block_of(b.peers, rows)
    back = rows if piece.start >= own.stop else 0
    return slice(piece.start - back, piece.stop - back)


def _partials(b: Builder, buffer: str, rows: int, *, own: bool) -> list[tuple[Span, int]]:
    """What arrived from the peers, in the order in which it is added.

    Args:
        own: whether a collective brought the own block as well.
    """
    if not b.together:
        return [(Span(buffer, 0, b.peers * rows), b.peers)] if b.peers else []
    ranks = range(b.size) if own else peers_of(b.place)
    places = (ranks.index(hop.source) for hop in b.hops("last"))
    return [(rows_of(buffer, block_of(at, rows)), 1) for at in places]


class _ColumnScatter:
    """Groups of columns of a product on their way to the ranks of their rows.

    Args:
        out: the buffer of the sums.
        in_flight: how many groups have memory of their own.
        own_last: whether the own rows of the last group are made when the others are sent.
    """

    def __init__(
        self,
        b: Builder,
        rows: int,
        groups: list[slice],
        out: str,
        in_flight: int,
        own_last: bool = False,
    ) -> None:
        self._b, self._rows, self._groups, self._out = b, rows, groups, out
        self._whole = len(groups) == 1
        self._apart = len(groups) - 1 if own_last and b.together else None
        stacked = b.size if b.together else b.peers
        for j, columns in enumerate(groups):
            slot, width = j % in_flight, columns.stop - columns.start
            b.scratch(self._product(j), b.size * rows, width, slot=f"made {slot}")
            b.scratch(self._slab(j), stacked * rows, width, slot=f"slab {slot}")

    def made(self, j: int, piece: slice) -> Span:
        """Where rows of a group's product, ``[n * s, width]``, are."""
        if j == self._apart:
            piece = _own_below(self._b, self._rows, piece)
        return rows_of(self._product(j), piece)

    def _product(self, j: int) -> str:
        return f"product {j}"

    def _slab(self, j: int) -> str:
        return f"partials {j}"

    def post(self, j: int) -> None:
        if self._b.together:
            blocks = self._b.peers if j == self._apart else self._b.size
            source = Span(self._product(j), 0, blocks * self._rows)
            out, chunks = Span(self._slab(j), 0, blocks * self._rows), len(self._groups)
            own = j != self._apart
            name = "partial for {target}"
            self._b.collective("all_to_all", source, out, name, j, chunks, own=own)
            return
        for hop in self._b.hops("last"):
            self.post_one(j, hop)

    def post_one(self, j: int, hop: Hop) -> None:
        rows, chunks = self._rows, len(self._groups)
        # One below the other in the order in which they are added.
        into = rows_of(self._slab(j), block_of(self._b.hops("last").index(hop), rows))
        made = self.made(j, block_of(hop.target, rows))
        self._b.post(hop, made, into, "partial for {target}", j, chunks)

    def add(self, j: int, *, aside: bool) -> None:
        b, rows, columns = self._b, self._rows, self._groups[j]
        out = Span(self._out, 0, rows, None if self._whole else (columns.start, columns.stop))
        own = self.made(j, block_of(b.rank, rows))
        terms = _partials(b, self._slab(j), rows, own=j != self._apart)
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
        mine, whole = Span("x", 0, rows), Span("whole", 0, n * rows)
        if b.together:
            b.collective("all_gather", mine, whole, "block {source}")
        else:
            for hop in b.hops("first"):
                b.post(hop, mine, rows_of("whole", block_of(hop.source, rows)), "block {source}")
        b.mark()
    groups = b.runs(inputs, "last") if scatters else []
    scatter = _ColumnScatter(b, rows, groups, "grad_x", in_flight=len(groups))
    for j, columns in enumerate(groups):
        weight = Span("weight", 0, outputs, (columns.start, columns.stop))
        everything = slice(0, n * rows)
        b.compute("gemm", [scatter.made(j, everything)], [rows_of("grad", everything), weight])
        scatter.post(j)
    if wgrad:
        if gathers and not b.together:
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

    def made(p: int, piece: slice) -> Span:
        if b.together and p == len(parts) - 1:
            piece = _own_below(b, (parts[p].stop - parts[p].start) // place.size, piece)
        return rows_of(f"product {p}", piece)

    def gemm(p: int, piece: slice) -> None:
        part = slice(parts[p].start + piece.start, parts[p].start + piece.stop)
        b.compute("gemm", [made(p, piece)], [rows_of("a", part), weight])

    def finish(p: int) -> None:
        """Sum the own block of a part, and send the sum around."""
        block = (parts[p].stop - parts[p].start) // place.size
        start = parts[p].start
        mine = Span("out", start + r * block, start + (r + 1) * block)
        if b.together:
            b.scratch(f"sum {p}", block, outputs, slot=f"sum {p % 2}")
            mine = Span(f"sum {p}", 0, block)
        terms = _partials(b, f"partials {p}", block, own=p < len(parts) - 1)
        b.add(mine, *terms, (made(p, block_of(r, block)), 1))
        if b.together:
            there = rows_of("out", parts[p])
            b.collective("all_gather", mine, there, "sum {source}", p, len(parts))
            return
        for hop in b.hops("first"):
            theirs = Span("out", start + hop.source * block, start + (hop.source + 1) * block)
            b.post(hop, mine, theirs, "sum {source}", p, len(parts))

    for p, part in enumerate(parts):
        length, last = part.stop - part.start, p == len(parts) - 1
        block = length // place.size
        b.scratch(f"product {p}", length, outputs, slot=f"product in {p % 2}")
        stacked = b.size if b.together else b.peers
        b.scratch(f"partials {p}", stacked * block, outputs, slot=f"partials in {p % 2}")
        if not last:
            gemm(p, slice(0, length))
        for at, (hop, piece) in enumerate(_in_turn(b, block, departures_of(place, 1))):
            if last and piece is not None:
                gemm(p, piece)
            if not b.together:
                into = rows_of(f"partials {p}", block_of(at, block))
                sent = made(p, block_of(hop.target, block))
                b.post(hop, sent, into, "partial for {target}", p, len(parts))
        if b.together:
            blocks = b.peers if last else b.size
            sent, into = (Span(f"{x} {p}", 0, blocks * block) for x in ("product", "partials"))
            name = "partial for {target}"
            b.collective("all_to_all", sent, into, name, p, len(parts), own=not last)
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
