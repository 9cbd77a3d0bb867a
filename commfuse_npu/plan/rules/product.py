"""A matrix product that is reduce-scattered: it sends the peers' blocks and adds the partials."""

from __future__ import annotations

from collections.abc import Callable

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.rules.pieces import block_of, peers_of, rows_of, sides_of
from commfuse_npu.plan.schedule import Hop

__all__ = ["Product"]

_PIECE = "partial for {target}"


class Product:
    """A product ``[n * s, columns]`` in scratch memory; block d goes to rank d.

    Args:
        number, of: its index, and the number of products of the program.
        rows: rows of a block.
        slot: products with the same slot use the same memory one after the other.
        own_last: whether the own block is computed after the others are sent.
    """

    def __init__(
        self,
        b: Builder,
        number: int,
        of: int,
        rows: int,
        columns: int,
        slot: int,
        own_last: bool = False,
    ) -> None:
        self._b = b
        self._number = number
        self._of = of
        self._rows = rows
        self._name = f"product {number}"
        self._partials = f"partials {number}"
        # A collective sends one run of rows, so the own block is below all others.
        self._own_below = own_last and b.as_collective
        arriving = b.size if b.as_collective else b.peers
        b.scratch(self._name, b.size * rows, columns, slot=f"made {slot}")
        b.scratch(self._partials, arriving * rows, columns, slot=f"slab {slot}")

    @property
    def _own(self) -> slice:
        """The rows of the own block in rank order."""
        return block_of(self._b.rank, self._rows)

    def made(self, piece: slice) -> Span:
        """The span of some of its rows, which are in order or with the own block at the end."""
        back = 0
        if self._own_below and piece == self._own:
            back = piece.start - self._b.peers * self._rows
        elif self._own_below and piece.start >= self._own.stop:
            back = self._rows
        return Span(self._name, piece.start - back, piece.stop - back)

    def send(self) -> None:
        """Send the blocks of all peers, and receive a partial of the own block from each."""
        b = self._b
        if not b.as_collective:
            for hop in b.hops("last"):
                self._post(hop)
            return
        end = (b.peers if self._own_below else b.size) * self._rows
        sent = Span(self._name, 0, end)
        into = Span(self._partials, 0, end)
        own = not self._own_below
        b.collective("all_to_all", sent, into, _PIECE, self._number, self._of, own=own)

    def send_as_made(self, gemm: Callable[[slice], None]) -> None:
        """Compute the rows on each side of the own block with ``gemm(rows)`` and send their blocks;
        compute the own block last."""
        b = self._b
        rows = self._rows
        unsent = sides_of(self._b.spec)
        for hop in b.hops("last"):
            side = next((side for side in unsent if hop.target in side), None)
            if side is not None:
                unsent.remove(side)
                gemm(slice(side[0] * rows, (side[-1] + 1) * rows))
            if not b.as_collective:
                self._post(hop)
        if b.as_collective:
            self.send()
        gemm(self._own)

    def _post(self, hop: Hop) -> None:
        b = self._b
        rows = self._rows
        # Stack the partials in the order in which they are added.
        into = rows_of(self._partials, block_of(b.hops("last").index(hop), rows))
        sent = self.made(block_of(hop.target, rows))
        b.post(hop, sent, into, _PIECE, self._number, self._of)

    def add(self, out: Span, *, on_side_stream: bool) -> None:
        """``out`` = the peers' partials in the schedule's order + the own block."""
        b = self._b
        rows = self._rows
        terms = [(Span(self._partials, 0, b.peers * rows), b.peers)] if b.peers else []
        if b.as_collective:
            ranks = peers_of(b.spec) if self._own_below else range(b.size)
            order = (ranks.index(hop.source) for hop in b.hops("last"))
            terms = [(rows_of(self._partials, block_of(at, rows)), 1) for at in order]
        b.add(out, *terms, (self.made(self._own), 1), on_side_stream=on_side_stream)
