"""Fully sharded weights, gathered and reduced block by block."""

from __future__ import annotations

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.rules.blocks import GatherPieces, ScatterPieces
from commfuse_npu.plan.rules.pieces import block_of, made_pieces, used_pieces
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, rule
from commfuse_npu.plan.schedule import Own, Place

__all__ = ["sharded_backward", "sharded_forward"]


def _pieces_under_way(b: Builder, rows: int, own: Own) -> int:
    """How many pieces of a sharded weight have memory: two blocks, or one more than lanes."""
    longest = max(run.stop - run.start for run in b.runs(rows, own))
    return max(2 * rows // longest, b.place.schedule.lanes_for(b.size) + 1)


def _weight_gather(b: Builder, rows: int, columns: int) -> GatherPieces:
    window = _pieces_under_way(b, rows, "first")
    return GatherPieces(b, rows, columns, "shard", whole=None, window=window)


@rule
def sharded_forward(place: Place, rows: int, columns: int) -> Builder:
    """Gather a weight, ``shard`` of which is here, and use it block by block; it is never whole.

    Work: ``use(piece, run)``.  Begun ahead, it has its first transfer under way.
    """
    b = Builder(place)
    gather = _weight_gather(b, rows, columns)
    gather.post(1)
    b.mark()
    gather.post()
    gather.use()
    return b


@sharded_forward.equals
def _(c: Carrier, rows: int, columns: int) -> None:
    whole = c.all_gather(c.given("shard", rows, columns))
    c.use(whole, used_pieces(c.place, rows), first=block_of(c.place.rank, rows))


@rule
def sharded_backward(
    place: Place, rows: int, columns: int, gathers: bool, scatters: bool
) -> Builder:
    """Make the gradient of a sharded weight and reduce-scatter it; gather the weight and use it.

    Work: ``make(out, run)``, ``finish(out, total, own)``, ``use(piece, run)``.  Begun ahead, it has
    the first transfer of the weight under way.
    """
    b = Builder(place)
    gather = _weight_gather(b, rows, columns) if gathers else None
    if gather is not None:
        gather.post(1)
    b.mark()
    if gather is not None:
        gather.post()
    scatter = None
    if scatters:
        stack = -(-_pieces_under_way(b, rows, "last") // IN_FLIGHT)
        scatter = ScatterPieces(b, rows, columns, stack, finish=True)
        scatter.make()
    if gather is not None:
        gather.use()
    if scatter is not None:
        scatter.finish()
    return b


@sharded_backward.equals
def _(c: Carrier, rows: int, columns: int, gathers: bool, scatters: bool) -> None:
    if scatters:
        gradient = c.make(c.place.size * rows, columns, made_pieces(c.place, rows), out=None)
        c.reduce_scatter(gradient, out="out", finish=True)
    if gathers:
        whole = c.all_gather(c.given("shard", rows, columns))
        first = None if scatters else block_of(c.place.rank, rows)
        c.use(whole, used_pieces(c.place, rows), first=first)
