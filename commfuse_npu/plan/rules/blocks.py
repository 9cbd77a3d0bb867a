"""Blocks computed or used piece by piece: attention, Ulysses, buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.rules.pieces import block_of, inside, made_pieces, rows_of, used_pieces
from commfuse_npu.plan.rules.rule import IN_FLIGHT, Carrier, Rule
from commfuse_npu.plan.schedule import Own

__all__ = [
    "Blocks",
    "BucketGather",
    "BucketScatter",
    "ExchangeBlocks",
    "GatherUse",
    "ProduceScatter",
]

Blocks = Literal["given", "made", "made and kept"]
"""Whether the blocks of an exchange are an input, or are computed piece by piece.

``made`` blocks are in scratch memory until they are sent; ``made and kept`` ones are computed into
a buffer of the operation.
"""


# ---------------------------------------------------------------------- attention, Ulysses


@dataclass(frozen=True)
class ProduceScatter(Rule):
    """Compute a matrix piece by piece and reduce-scatter it into ``out``.

    Work: ``make(out, run)``.

    Chunk j of all peers is added at once.  Memory is for two chunks; a third one is computed when
    the first is added, before the own block exists.
    """

    rows: int
    columns: int

    def build(self, b: Builder) -> None:
        rows = self.rows
        columns = self.columns
        own = block_of(b.rank, rows)
        out = Span("out", 0, rows)
        if not b.peers:
            b.compute("make", [out], [], own)
            return
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

    def unfused(self, c: Carrier) -> None:
        whole = c.make(
            c.spec.size * self.rows, self.columns, made_pieces(c.spec, self.rows), out=None
        )
        c.reduce_scatter(whole, out="out")


@dataclass(frozen=True)
class GatherUse(Rule):
    """Gather ``shard`` and use each piece as it arrives; with ``keep``, also the whole at the end.

    Work: ``use(piece, run)``; ``wgrad(whole)``.
    """

    rows: int
    columns: int
    keep: bool = False

    def build(self, b: Builder) -> None:
        rows = self.rows
        own = block_of(b.rank, rows)
        runs = b.runs(rows)
        hops = b.hops("first")
        b.scratch("whole", b.size * rows, self.columns)
        for j, run in enumerate(runs):
            for hop in hops:
                into = rows_of("whole", inside(hop.source, rows, run))
                b.post(hop, rows_of("shard", run), into, "block {source}", j, len(runs))
        b.compute("use", [], [Span("shard", 0, rows)], own)
        for run in runs:
            for hop in hops:
                part = inside(hop.source, rows, run)
                b.compute("use", [], [rows_of("whole", part)], part)
        if self.keep:
            b.copy(rows_of("whole", own), Span("shard", 0, rows))
            b.compute("wgrad", [], [Span("whole", 0, b.size * rows)])

    def unfused(self, c: Carrier) -> None:
        rows = self.rows
        whole = c.all_gather(c.given("shard", rows, self.columns))
        c.use(whole, used_pieces(c.spec, rows), first=block_of(c.spec.rank, rows))
        if self.keep:
            c.wgrad(whole)


@dataclass(frozen=True)
class ExchangeBlocks(Rule):
    """All-to-all of blocks that are computed, or used, or both, piece by piece.

    The own block is computed last and used first.

    Args:
        blocks: unless ``made``, they are in ``blocks``, a buffer of the operation.
        keep: whether the operation has a buffer ``received`` for the result.

    Work: ``make(out, run)``, ``use(piece, run)``; ``wgrad()``, which needs neither of them and
    overlaps with the last transfers.
    """

    rows: int
    columns: int
    blocks: Blocks
    uses: bool
    keep: bool
    wgrad: bool = False

    def build(self, b: Builder) -> None:
        rows = self.rows
        makes = self.blocks != "given"
        staged = self.blocks == "made"
        order: Own = "last" if makes else "first"
        own = block_of(b.rank, rows)
        runs = b.spec.schedule.runs(rows)
        if not self.keep:
            b.scratch("received", b.size * rows, self.columns)
        for j, run in enumerate(runs):
            length = run.stop - run.start
            if staged:
                b.scratch(f"made {j}", b.peers * length, self.columns, slot=f"made {j % IN_FLIGHT}")
            for at, hop in enumerate(b.hops(order)):
                part = inside(hop.target, rows, run)
                out = (
                    rows_of(f"made {j}", block_of(at, length))
                    if staged
                    else rows_of("blocks", part)
                )
                if makes:
                    b.compute("make", [out], [], part)
                into = rows_of("received", inside(hop.source, rows, run))
                b.post(hop, out, into, "block {source} for {target}", j, len(runs))
        own_block = rows_of("received" if staged else "blocks", own)
        if makes:
            b.compute("make", [own_block], [], own)
        if self.wgrad:
            b.compute("wgrad")
        if self.keep and not staged:
            b.copy(rows_of("received", own), own_block)
        if self.uses:
            b.compute("use", [], [own_block], own)
            for run in runs:
                for hop in b.hops(order):
                    part = inside(hop.source, rows, run)
                    b.compute("use", [], [rows_of("received", part)], part)

    def unfused(self, c: Carrier) -> None:
        rows = self.rows
        total = c.spec.size * rows
        makes = self.blocks != "given"
        if makes:
            out = "blocks" if self.blocks == "made and kept" else None
            sent = c.make(total, self.columns, made_pieces(c.spec, rows), out=out)
        else:
            sent = c.given("blocks", total, self.columns)
        received = c.all_to_all(sent, out="received" if self.keep else None)
        if self.wgrad:
            c.wgrad()
        if self.uses:
            c.use(received, used_pieces(c.spec, rows, "last" if makes else "first"))


# ---------------------------------------------------------------------- buckets


@dataclass(frozen=True)
class BucketScatter(Rule):
    """Reduce-scatter ``bucket``, gradients of several layers, in place.

    Args:
        rows: elements of a shard.
        stack: number of partials of a chunk that are added at once.
        in_flight: number of stacks with memory; the others are sent as these are added.

    Work: ``finish(out, total, own)`` completes the sum, with a wide total; not called for one rank,
    which has nothing to sum.  Run ahead, it posts all transfers that have memory.
    """

    rows: int
    stack: int
    in_flight: int

    def build(self, b: Builder) -> None:
        rows = self.rows
        in_flight = self.in_flight
        runs = b.runs(rows)
        hops = b.hops("last")
        stack = max(1, min(self.stack, b.peers))
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
            own = rows_of("bucket", block_of(b.rank, rows))
            b.compute("finish", [own], [Span("total", 0, rows), own])

    def unfused(self, c: Carrier) -> None:
        c.reduce_scatter(c.given("bucket", c.spec.size * self.rows, 1), out="bucket", finish=True)


@dataclass(frozen=True)
class BucketGather(Rule):
    """All-gather the shards of ``bucket``, parameters of several layers, in place.

    Args:
        rows: elements of a shard.

    Run ahead, it posts all its transfers.
    """

    rows: int

    def build(self, b: Builder) -> None:
        runs = b.runs(self.rows)
        for j, run in enumerate(runs):
            for hop in b.hops("first"):
                own, peer = (inside(rank, self.rows, run) for rank in (b.rank, hop.source))
                sent = rows_of("bucket", own)
                into = rows_of("bucket", peer)
                b.post(hop, sent, into, "block {source}", j, len(runs))
        b.end_ahead()

    def unfused(self, c: Carrier) -> None:
        bucket = c.given("bucket", c.spec.size * self.rows, 1)
        c.all_gather(c.own_block(bucket), out="bucket")
