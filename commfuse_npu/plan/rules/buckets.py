"""Gradient and parameter buckets, exchanged behind the work of others."""

from __future__ import annotations

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Span
from commfuse_npu.plan.rules.pieces import block_of, inside, rows_of, stacks_of
from commfuse_npu.plan.rules.rule import Carrier, rule
from commfuse_npu.plan.schedule import Place

__all__ = ["bucket_gather", "bucket_scatter"]


@rule
def bucket_scatter(place: Place, rows: int, stack: int, in_flight: int) -> Builder:
    """Sum the shards of ``bucket`` over their ranks.

    Args:
        rows: elements of a shard.
        stack: how many partials of a chunk are added at once.
        in_flight: how many stacks have memory; the others are posted when one of them is added.

    Work: ``finish(out, total, own)``.  Begun ahead, it has everything under way that has memory.
    """
    b = Builder(place)
    runs = b.runs(rows, "last")
    stacks = stacks_of(runs, b.hops("last"), stack)
    own = rows_of("bucket", block_of(place.rank, rows))
    b.scratch("total", rows, 1, wide=True)
    for t, (_, run, some, _) in enumerate(stacks):
        length = len(some) * (run.stop - run.start)
        b.scratch(f"partials {t}", length, 1, slot=f"partials {t % in_flight}")

    def post(t: int) -> None:
        j, run, some, _ = stacks[t]
        for at, hop in enumerate(some):
            theirs = rows_of("bucket", inside(hop.target, rows, run))
            into = rows_of(f"partials {t}", block_of(at, run.stop - run.start))
            b.post(hop, theirs, into, "partial for {target}", j, len(runs))

    for t in range(min(in_flight, len(stacks))):
        post(t)
    b.mark()
    for t, (_, run, some, at) in enumerate(stacks):
        total = rows_of("total", run)
        partials = Span(f"partials {t}", 0, len(some) * (run.stop - run.start)), len(some)
        b.add(total, *([(total, 1)] if at else []), partials)
        if t + in_flight < len(stacks):
            post(t + in_flight)
    b.settle()
    if b.peers:
        b.compute("finish", [own], [Span("total", 0, rows), own])
    return b


@bucket_scatter.equals
def _(c: Carrier, rows: int, stack: int, in_flight: int) -> None:
    c.reduce_scatter(c.given("bucket", c.place.size * rows, 1), out="bucket", finish=True)


@rule
def bucket_gather(place: Place, rows: int, last_first: bool) -> Builder:
    """Fetch the other ranks' shards of ``bucket``, in place.

    Args:
        rows: elements of a shard.
        last_first: the chunks of a shard travel from its end to its start.

    Begun ahead, it has everything under way.
    """
    b = Builder(place)
    runs = b.runs(rows, "first")
    for j, run in enumerate(reversed(runs) if last_first else runs):
        for hop in b.hops("first"):
            mine, theirs = (inside(rank, rows, run) for rank in (place.rank, hop.source))
            sent, into = rows_of("bucket", mine), rows_of("bucket", theirs)
            b.post(hop, sent, into, "block {source}", j, len(runs))
    b.mark()
    return b


@bucket_gather.equals
def _(c: Carrier, rows: int, last_first: bool) -> None:
    bucket = c.given("bucket", c.place.size * rows, 1)
    c.all_gather(c.own_block(bucket), out="bucket")
