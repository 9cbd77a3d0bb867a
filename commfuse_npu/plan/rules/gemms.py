"""Tensor-parallel linear layers: chunk j of all peers is one GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.rules.pieces import (
    block_of,
    gather_pieces,
    inside,
    peers_of,
    rows_of,
    scatter_pieces,
    sides_of,
)
from commfuse_npu.plan.rules.product import Product
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, Rule

__all__ = ["ColumnBackward", "GatherGemm", "GemmScatter"]

_AHEAD = 8
"""Most transfers posted before the first work; a limit, because each post takes host time."""


@dataclass(frozen=True)
class GatherGemm(Rule):
    """Gather ``shard`` and multiply it by ``weight``; optionally use it for a weight gradient.

    Args:
        outputs: columns of ``weight``; 0 for no product.
        other: columns of ``other``, whose product with all gathered rows is the weight gradient;
            0 for none.

    Work: ``gemm(out, a, b)``; ``wgrad(whole rows, other rows)``.

    One chunk, or the chunks of one peer, arrive in place.  With one chunk there is a GEMM for the
    rows on each side of the own block.  Else a chunk of all peers is staged, multiplied, and its
    result copied into place; a collective puts the own rows between those of the peers, which makes
    two GEMMs.  Chunk j + 1 is posted before the work on chunk j, so that the host does not delay
    the work.  Three chunks of 8 ranks, of which one is posted ahead::

        host     post 0, own block, post 1, chunk 0, post 2, chunk 1, chunk 2, wgrad
        compute  | own block | chunk 0 | chunk 1 | chunk 2 | wgrad |
        links    | chunk 0   | chunk 1 | chunk 2 |         |       |
    """

    rows: int
    inputs: int
    outputs: int = 0
    other: int = 0

    def build(self, b: Builder) -> None:
        rows = self.rows
        runs = b.runs(rows)
        own = block_of(b.rank, rows)
        in_place = self._in_place(b)
        if in_place or self.other:
            b.scratch("whole", b.size * rows, self.inputs)
        if not in_place:
            for j, run in enumerate(runs):
                b.scratch(f"staged {j}", _stacked(b) * (run.stop - run.start), self.inputs)
        # 1. Post the first chunks, and compute the own block while they are in flight.
        transfers = 1 if b.as_collective else max(1, b.peers)
        ahead = max(1, _AHEAD // transfers)
        for j in range(ahead):
            self._post(b, j)
        self._gemm(b, rows_of("out", own), Span("shard", 0, rows))
        if ahead < 2:
            self._post(b, 1)
        if self.other and not (b.as_collective and in_place):
            b.copy(rows_of("whole", own), Span("shard", 0, rows), on_side_stream=True)
        # 2. Each chunk as it arrives.
        for j, run in enumerate(runs):
            if j + 1 >= max(2, ahead):
                self._post(b, j + 1)
            if in_place:
                for side in sides_of(b.spec):
                    section = slice(side[0] * rows + run.start, side[-1] * rows + run.stop)
                    self._gemm(b, rows_of("out", section), rows_of("whole", section))
            else:
                self._multiply_staged(b, j)
        # 3. All rows have arrived.
        if self.other:
            whole = Span("whole", 0, b.size * rows)
            b.compute("wgrad", [], [whole, Span("other", 0, b.size * rows)])

    def _in_place(self, b: Builder) -> bool:
        """Whether chunks arrive in place: one of several blocks is not one run of rows there."""
        return len(b.runs(self.rows)) == 1 or (b.peers <= 1 and not b.as_collective)

    def _post(self, b: Builder, j: int) -> None:
        """Post chunk ``j``, if there is one."""
        rows = self.rows
        runs = b.runs(rows)
        chunks = len(runs)
        if j >= chunks:
            return
        in_place = self._in_place(b)
        sent = rows_of("shard", runs[j])
        length = runs[j].stop - runs[j].start
        if b.as_collective:
            out = Span("whole" if in_place else f"staged {j}", 0, b.size * length)
            b.collective("all_gather", sent, out, "block {source}", j, chunks)
            return
        peers = peers_of(b.spec)
        for hop in b.hops("first"):
            into = rows_of("whole", inside(hop.source, rows, runs[j]))
            if not in_place:
                into = rows_of(f"staged {j}", block_of(peers.index(hop.source), length))
            b.post(hop, sent, into, "block {source}", j, chunks)

    def _gemm(self, b: Builder, out: Span, piece: Span) -> None:
        if self.outputs:
            b.compute("gemm", [out], [piece, Span("weight", 0, self.inputs)])

    def _multiply_staged(self, b: Builder, j: int) -> None:
        """Multiply chunk ``j`` of all peers, and copy it and its result into place."""
        runs = b.runs(self.rows)
        run = runs[j]
        length = run.stop - run.start
        staged = f"staged {j}"
        result = f"result {j}"
        if self.other:
            _spread(b, "whole", staged, run, self.rows, on_side_stream=True)
        if self.outputs:
            b.scratch(result, _stacked(b) * length, self.outputs, slot=f"result {j % 2}")
        pieces = [slice(0, b.peers * length)]
        if b.as_collective:
            pieces = [slice(side[0] * length, (side[-1] + 1) * length) for side in sides_of(b.spec)]
        for piece in pieces:
            self._gemm(b, rows_of(result, piece), rows_of(staged, piece))
        if self.outputs:
            last = j == len(runs) - 1
            _spread(b, "out", result, run, self.rows, on_side_stream=not last)

    def unfused(self, c: Carrier) -> None:
        rows = self.rows
        whole = c.all_gather(c.given("shard", rows, self.inputs))
        if self.outputs:
            pieces = [(runs, None) for runs in gather_pieces(c.spec, rows)]
            own = block_of(c.spec.rank, rows)
            c.gemm(
                whole, c.given("weight", self.inputs, self.outputs), pieces, out="out", first=own
            )
        if self.other:
            c.wgrad(whole, c.given("other", c.spec.size * rows, self.other))


def _stacked(b: Builder) -> int:
    """Number of blocks in a staged chunk: a collective has the own one, too."""
    return b.size if b.as_collective else b.peers


def _spread(
    b: Builder, buffer: str, stack: str, run: slice, rows: int, *, on_side_stream: bool
) -> None:
    """Copy the stacked chunks of all peers, rows ``run`` of each block, into ``buffer``."""
    length = run.stop - run.start
    at = 0
    for side in sides_of(b.spec):
        first = side[0] * rows
        strip = Span(buffer, first + run.start, first + run.stop, None, len(side), rows)
        at = side[0] * length if b.as_collective else at
        b.copy(strip, Span(stack, at, at + len(side) * length), on_side_stream=on_side_stream)
        at += len(side) * length


@dataclass(frozen=True)
class GemmScatter(Rule):
    """Multiply ``a`` by ``weight`` and reduce-scatter the product.

    Work: ``gemm(out, a, b)``.

    The *columns* are cut into groups, so that one GEMM over all rows computes contiguous pieces for
    all peers.  Only the last group is also cut by rows: first the rows on each side of the own
    block, then the own block.  Two groups are in flight at a time.
    """

    rows: int
    inputs: int
    outputs: int

    def build(self, b: Builder) -> None:
        rows = self.rows
        groups = b.runs(self.outputs)
        outs = _columns_of("out", rows, groups)
        last = len(groups) - 1
        products = _by_columns(b, groups, rows, IN_FLIGHT, own_last=True)

        def gemm(j: int, piece: slice) -> None:
            weight = Span("weight", 0, self.inputs, (groups[j].start, groups[j].stop))
            b.compute("gemm", [products[j].made(piece)], [rows_of("a", piece), weight])

        for j, product in enumerate(products):
            if j >= IN_FLIGHT:
                products[j - IN_FLIGHT].add(outs[j - IN_FLIGHT], on_side_stream=True)
            if j < last:
                gemm(j, slice(0, b.size * rows))
                product.send()
            else:
                product.send_as_made(partial(gemm, j))
        for j in range(max(0, len(groups) - IN_FLIGHT), len(groups)):
            products[j].add(outs[j], on_side_stream=j < last)

    def unfused(self, c: Carrier) -> None:
        rows = self.rows
        a = c.given("a", c.spec.size * rows, self.inputs)
        weight = c.given("weight", self.inputs, self.outputs)
        pieces = scatter_pieces(c.spec, rows, self.outputs)
        product = c.gemm(a, weight, pieces, last=block_of(c.spec.rank, rows))
        c.reduce_scatter(product, out="out")


def _by_columns(
    b: Builder, groups: Sequence[slice], rows: int, in_flight: int, own_last: bool = False
) -> list[Product]:
    """A :class:`Product` per group of columns; ``in_flight`` of them have memory at a time."""
    count = len(groups)
    widths = [columns.stop - columns.start for columns in groups]
    return [
        Product(b, j, count, rows, width, j % in_flight, own_last and j == count - 1)
        for j, width in enumerate(widths)
    ]


def _columns_of(buffer: str, rows: int, groups: Sequence[slice]) -> list[Span]:
    """The span of each group of columns."""
    if len(groups) == 1:
        return [Span(buffer, 0, rows)]
    return [Span(buffer, 0, rows, (columns.start, columns.stop)) for columns in groups]


@dataclass(frozen=True)
class ColumnBackward(Rule):
    """The gradients of ``all_gather(x) @ weight^T``: dgrad is reduce-scattered, x gathered again.

    Args:
        inputs: columns of ``x``.
        outputs: columns of ``grad``, ``[n * s, outputs]``.
        dgrad, wgrad: whether dgrad and wgrad, which gathers x, are needed.

    Work: ``gemm(out, a, b)``; ``wgrad(grad rows, whole rows)``.

    Run ahead, it posts the gather of x.  The dgrad is computed in groups of columns while x
    arrives; its partials are sent during wgrad and added after it.

    A group of columns of the weight is neither contiguous nor the transpose of a contiguous matrix,
    so aclnn copies it before the GEMM (read in ``ContiguousAndCast`` of CANN's ops-nn): one copy of
    the weight per backward, which the simulator counts.  Groups of rows need no copy, but if they
    are blocks of ``grad`` links stay idle, and if they are chunks of every block each is a GEMM per
    peer.
    """

    rows: int
    inputs: int
    outputs: int
    dgrad: bool
    wgrad: bool

    def build(self, b: Builder) -> None:
        rows = self.rows
        wgrad = self.wgrad
        n = b.size
        r = b.rank
        if wgrad:
            b.scratch("whole", n * rows, self.inputs)
            b.all_gather(Span("x", 0, rows), Span("whole", 0, n * rows), "block {source}")
            b.end_ahead()
        groups = b.runs(self.inputs) if self.dgrad else []
        products = _by_columns(b, groups, rows, len(groups))
        everything = slice(0, n * rows)
        for product, columns in zip(products, groups, strict=True):
            weight = Span("weight", 0, self.outputs, (columns.start, columns.stop))
            b.compute("gemm", [product.made(everything)], [rows_of("grad", everything), weight])
            product.send()
        if wgrad:
            if not b.as_collective:
                b.copy(rows_of("whole", block_of(r, rows)), Span("x", 0, rows), on_side_stream=True)
            b.compute("wgrad", [], [Span("grad", 0, n * rows), Span("whole", 0, n * rows)])
        outs = _columns_of("grad_x", rows, groups)
        for product, out in zip(products, outs, strict=True):
            product.add(out, on_side_stream=wgrad or out is not outs[-1])

    def unfused(self, c: Carrier) -> None:
        inputs = self.inputs
        everything = slice(0, c.spec.size * self.rows)
        grad = c.given("grad", everything.stop, self.outputs)
        # In Megatron's order, read in its LinearWithGradAccumulationAndAsyncCommunication: x is
        # gathered during dgrad, and dgrad is reduce-scattered during wgrad.
        whole = c.all_gather(c.given("x", self.rows, inputs)) if self.wgrad else None
        if self.dgrad:
            runs = c.spec.schedule.runs(inputs)
            pieces = [((everything,), columns) for columns in runs]
            dgrad = c.gemm(grad, c.given("weight", self.outputs, inputs), pieces)
            c.reduce_scatter(dgrad, out="grad_x")
        if self.wgrad:
            c.wgrad(grad, whole)
