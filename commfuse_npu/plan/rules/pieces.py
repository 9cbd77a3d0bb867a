"""The rows and columns of each piece of work: in programs, and in their unfused forms.

Legend: ``s`` rows of a rank's block; a whole matrix has the blocks of all ranks, in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.plan.instructions import Span
from commfuse_npu.plan.schedule import Own, RankSpec

__all__ = [
    "Piece",
    "block_of",
    "gather_pieces",
    "inside",
    "made_pieces",
    "peers_of",
    "rows_of",
    "scatter_pieces",
    "sides_of",
    "used_pieces",
]


Piece = tuple[Sequence[slice], slice | None]
"""Runs of rows that one GEMM takes together, and the columns of the result; ``None``: all."""


def gather_pieces(spec: RankSpec, rows: int) -> list[tuple[slice, ...]]:
    """The rows of the whole matrix in each GEMM of :class:`GatherGemm`, in order."""
    runs = spec.schedule.runs(rows)
    by_peer = spec.as_collective or len(runs) == 1 or spec.size == 1
    blocks = sides_of(spec) if by_peer else [peers_of(spec)]
    pieces = [
        tuple(slice(p * rows + run.start, p * rows + run.stop) for p in side)
        for run in runs
        for side in blocks
    ]
    return [(block_of(spec.rank, rows),), *pieces]


def scatter_pieces(spec: RankSpec, rows: int, columns: int) -> list[Piece]:
    """The rows and columns of the whole result in each GEMM of :class:`GemmScatter`, in order."""
    *groups, last = spec.schedule.runs(columns)
    everything = slice(0, spec.size * rows)
    pieces: list[Piece] = [((everything,), group) for group in groups]
    pieces += [
        ((slice(side[0] * rows, (side[-1] + 1) * rows),), last) for side in reversed(sides_of(spec))
    ]
    return [*pieces, ((block_of(spec.rank, rows),), last)]


def used_pieces(spec: RankSpec, rows: int, own: Own = "first") -> list[slice]:
    """The rows of each call of the work ``use``, as pieces arrive: the own block, then the peers'.

    Args:
        own: the order of the peers; ``last`` if the senders compute their blocks piece by piece.
    """
    hops = spec.schedule.hops(spec.rank, spec.size, own)
    runs = spec.schedule.runs(rows)
    pieces = [inside(hop.source, rows, run) for run in runs for hop in hops]
    return [block_of(spec.rank, rows), *pieces]


def made_pieces(spec: RankSpec, rows: int) -> list[slice]:
    """The rows of each call of the work ``make``, in the order of sends: the own block last."""
    hops = spec.schedule.hops(spec.rank, spec.size, "last")
    runs = spec.schedule.runs(rows)
    pieces = [inside(hop.target, rows, run) for run in runs for hop in hops]
    return [*pieces, block_of(spec.rank, rows)]


def sides_of(spec: RankSpec) -> list[range]:
    """The blocks before the own one, and those after it; each side is one run of rows."""
    sides = [range(spec.rank), range(spec.rank + 1, spec.size)]
    return [side for side in sides if side]


def peers_of(spec: RankSpec) -> list[int]:
    return [peer for peer in range(spec.size) if peer != spec.rank]


def block_of(rank: int, rows: int) -> slice:
    """The rows of a rank's block in a whole matrix."""
    return slice(rank * rows, (rank + 1) * rows)


def inside(block: int, rows: int, run: slice) -> slice:
    """The rows of a whole matrix for rows ``run`` of a block."""
    return slice(block * rows + run.start, block * rows + run.stop)


def rows_of(buffer: str, run: slice) -> Span:
    return Span(buffer, run.start, run.stop)
