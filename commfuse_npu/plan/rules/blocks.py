"""Blocks computed or used piece by piece: attention, Ulysses, buckets."""

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
]

Blocks = Literal["given", "made", "made and kept"]
"""Whether the blocks of an exchange are an input, or are computed piece by piece.

``made`` blocks are in scratch memory until they are sent; ``made and kept`` ones are computed into
a buffer of the operation.
"""


# ---------------------------------------------------------------------- attention, Ulysses


@Rule
def produce_scatter(spec: RankSpec, rows: int, columns: int) -> Builder:
    """Compute a matrix piece by piece and reduce-scatter it into ``out``.

    Work: ``make(out, run)``.

    Chunk j of all peers is added at once.  Memory is for two chunks; a third one is computed when
    the first is added, before the own block exists.
    """
    b = Builder(spec)
    own = block_of(spec.rank, rows)
    out = Span("out", 0, rows)
    if not b.peers:
        b.compute("make", [out], [], own)
        return b
    runs = b.runs(rows)
    hops = b.hops("last")
    in_parts = len(runs) > IN_FLIGHT
    b.scratch("own", rows, columns)
    if in_parts:
        b.scratch("total", rows, columns, wide=True)

    def add(j: int) -> None:
        partials = Span(f"partials {j}", 0, b.peers * (runs[j].stop - runs[j].start)), b.peers
        if in_parts:
            b.add(rows_of("total", runs[j]), partials, on_side_stream=True)
        else:
            b.add(rows_of("out", runs[j]), partials, (rows_of("own", runs[j]), 1))

    for j, run in enumerate(runs):
        if j >= IN_FLIGHT:
            add(j - IN_FLIGHT)
        length = run.stop - run.start
        for name in ("made", "partials"):
            b.scratch(f"{name} {j}", b.peers * length, columns, slot=f"{name} {j % IN_FLIGHT}")
        for at, hop in enumerate(hops):
            part = inside(hop.target, rows, run)
            place = block_of(at, length)
            sent = rows_of(f"made {j}", place)
            b.compute("make", [sent], [], part)
            into = rows_of(f"partials {j}", place)
            b.post(hop, sent, into, "partial for {target}", j, len(runs))
    b.compute("make", [Span("own", 0, rows)], [], own)
    for j in range(max(0, len(runs) - IN_FLIGHT), len(runs)):
        add(j)
    if in_parts:
        b.add(out, (Span("total", 0, rows), 1), (Span("own", 0, rows), 1))
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
    own = block_of(spec.rank, rows)
    runs = b.runs(rows)
    hops = b.hops("first")
    b.scratch("whole", spec.size * rows, columns)
    for j, run in enumerate(runs):
        for hop in hops:
            into = rows_of("whole", inside(hop.source, rows, run))
            b.post(hop, rows_of("shard", run), into, "block {source}", j, len(runs))
    b.compute("use", [], [Span("shard", 0, rows)], own)
    for run in runs:
        for hop in hops:
            part = inside(hop.source, rows, run)
            b.compute("use", [], [rows_of("whole", part)], part)
    if keep:
        b.copy(rows_of("whole", own), Span("shard", 0, rows))
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
    makes = blocks != "given"
    staged = blocks == "made"
    order: Own = "last" if makes else "first"
    own = block_of(spec.rank, rows)
    runs = spec.schedule.runs(rows)
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
    total = c.spec.size * rows
    makes = blocks != "given"
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


# ---------------------------------------------------------------------- buckets


@Rule
def bucket_scatter(spec: RankSpec, rows: int, stack: int, in_flight: int) -> Builder:
    """Reduce-scatter ``bucket``, gradients of several layers, in place.

    Args:
        rows: elements of a shard.
        stack: number of partials of a chunk that are added at once.
        in_flight: number of stacks with memory; the others are sent as these are added.

    Work: ``finish(out, total, own)`` completes the sum, with a wide total; not called for one rank,
    which has nothing to sum.  Run ahead, it posts all transfers that have memory.
    """
    b = Builder(spec)
    runs = b.runs(rows)
    hops = b.hops("last")
    stack = max(1, min(stack, b.peers))
    stacks = [
        (j, run, hops[at : at + stack], at)
        for j, run in enumerate(runs)
        for at in range(0, len(hops), stack)
    ]
    if stacks:
        b.scratch("total", rows, 1, wide=True)

    def add(t: int) -> None:
        _, run, group, at = stacks[t]
        partials = Span(f"partials {t}", 0, len(group) * (run.stop - run.start)), len(group)
        total = rows_of("total", run)
        so_far = [(total, 1)] if at else []
        b.add(total, *so_far, partials)

    for t, (j, run, group, _) in enumerate(stacks):
        if t == in_flight:
            b.end_ahead()
        if t >= in_flight:
            add(t - in_flight)
        length = run.stop - run.start
        b.scratch(f"partials {t}", len(group) * length, 1, slot=f"partials {t % in_flight}")
        for at, hop in enumerate(group):
            sent = rows_of("bucket", inside(hop.target, rows, run))
            into = rows_of(f"partials {t}", block_of(at, length))
            b.post(hop, sent, into, "partial for {target}", j, len(runs))
    if len(stacks) <= in_flight:
        b.end_ahead()
    for t in range(max(0, len(stacks) - in_flight), len(stacks)):
        add(t)
    b.settle()
    if stacks:
        own = rows_of("bucket", block_of(spec.rank, rows))
        b.compute("finish", [own], [Span("total", 0, rows), own])
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
    runs = b.runs(rows)
    for j, run in enumerate(runs):
        for hop in b.hops("first"):
            own, peer = (inside(rank, rows, run) for rank in (spec.rank, hop.source))
            sent = rows_of("bucket", own)
            into = rows_of("bucket", peer)
            b.post(hop, sent, into, "block {source}", j, len(runs))
    b.end_ahead()
    return b


@bucket_gather.equals
def _(c: Carrier, rows: int) -> None:
    bucket = c.given("bucket", c.spec.size * rows, 1)
    c.all_gather(c.own_block(bucket), out="bucket")
