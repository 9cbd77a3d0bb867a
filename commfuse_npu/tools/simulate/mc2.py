"""MC2's kernels: a gather before a GEMM, or a reduce-scatter after one, tile by tile of rows.

Read in hicann/ops-transformer@c29bc10, ``mc2``: a kernel divides a rank's block of rows into up to
16 tiles of 128 rows or more, and transfers one tile while it multiplies another.  The host chooses
the tiles by a formula of estimated times: long ones and a short one.  Here they are equal, in the
number that is the fastest by an estimate; over the 72 points of docs/layers_tables.md that is
between 5.6 % faster and 0.3 % slower than with the host's tiles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from commfuse_npu.plan import split
from commfuse_npu.tools.hardware.machine import ITEM_BYTES

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.rank import Rank

RANKS = 2, 4, 8, 16, 32
"""Supported group sizes; a full mesh has up to 8 (``VALID_RANK``)."""
_INNER = range(256, 65535)
"""Supported inner dimensions."""
_ROUNDS = 4
"""Rounds of a transfer around a double ring of 4 to 32 ranks: for a small one the host
expects 74 to 95 us, whatever the number of ranks."""
_MOST_TILES = 16
_LEAST_ROWS = 128
"""Limits of the kernel: tiles of a block, and rows of a tile."""


def supports(rank: Rank, inner: int) -> bool:
    """Whether there is a kernel for such a layer."""
    return rank.sequence_parallel and rank.size in RANKS and inner in _INNER


def gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the kernel: the own block first, then tiles of the others as they arrive; one launch.

    Returns:
        What to wait for until all rows have arrived.
    """
    machine = rank.machine
    others = rank.size - 1
    own = machine.gemm(rows, inner, outer)
    layout = _layout(rank, inner, outer)

    def seconds(tiles: list[int]) -> float:
        time = layout + own
        arrived = 0.0
        for tile in tiles:
            arrived += _transfer_seconds(rank, tile * inner)
            time = max(time, arrived) + machine.gemm(others * tile, inner, outer, start=False)
        return time

    tiles = min(_cuts(rows), key=seconds)
    arrivals = [
        _transfer(rank, f"{name} gather", tile * inner, int(not number))
        for number, tile in enumerate(tiles)
    ]
    rank.compute(f"{name} layout of the weight", layout, launches=0)
    rank.compute(f"{name} own", own, launches=0)
    for tile, waits in zip(tiles, arrivals, strict=True):
        part = machine.gemm(others * tile, inner, outer, start=False)
        rank.compute(name, part, waits, launches=0)
    return arrivals[-1]


def gemm_scatter(rank: Rank, name: str, rows: int, inner: int, outer: int) -> None:
    """Add the kernel: one tile of all blocks at a time, each followed by its transfer."""
    machine = rank.machine

    def seconds(tiles: list[int]) -> float:
        time = arrived = 0.0
        for tile in tiles:
            time += machine.gemm(rank.size * tile, inner, outer, start=False)
            arrived = max(arrived, time) + _transfer_seconds(rank, tile * outer, sums=True)
        return arrived

    tiles = min(_cuts(rows), key=seconds)
    waits = tuple[int, ...]()
    rank.compute(f"{name} layout of the weight", _layout(rank, inner, outer))
    for number, tile in enumerate(tiles):
        part = machine.gemm(rank.size * tile, inner, outer, start=not number)
        rank.compute(name, part, launches=0)
        waits = _transfer(rank, f"{name} scatter", tile * outer, 0, sums=True)
    rank.need(waits)


def _cuts(rows: int) -> list[list[int]]:
    """The rows of a block in tiles, for every number of tiles."""
    most = max(1, min(_MOST_TILES, rows // _LEAST_ROWS))
    cuts = (split(rows, count) for count in range(1, most + 1))
    return [[stop - start for start, stop in pairwise(cut)] for cut in cuts]


def _layout(rank: Rank, inner: int, outer: int) -> float:
    """Seconds of the layout conversion of the weight before a kernel."""
    return rank.machine.memory(2 * ITEM_BYTES * inner * outer)


def _ring_rounds(rank: Rank) -> int:
    """Number of rounds of a transfer around a ring; 0 where it is a plain collective."""
    ring = rank.machine.inside.topology != "full_mesh" and rank.size > 2
    return min(rank.size - 1, _ROUNDS) if ring else 0


def _transfer_seconds(rank: Rank, numbers: int, *, sums: bool = False) -> float:
    """About the seconds of :func:`_transfer`, beside a GEMM."""
    machine = rank.machine
    size = numbers * ITEM_BYTES
    factor = machine.summed(rank.size) if sums and not _ring_rounds(rank) else 1.0
    latency = machine.inside.latency
    seconds = machine.collective(size * factor, rank.size) - latency
    return seconds * machine.inside.beside_work + latency * max(1, _ring_rounds(rank))


def _transfer(
    rank: Rank, name: str, numbers: int, launches: int, *, sums: bool = False
) -> tuple[int, ...]:
    """Transfer ``numbers`` elements per block over a full mesh, or around a double ring."""
    size = numbers * ITEM_BYTES
    n = rank.size
    rounds = _ring_rounds(rank)
    if not rounds:
        return rank.collective(name, size, launches=launches, sums=sums)
    waits = tuple[int, ...]()
    neighbors = [((rank.rank + 1) % n, (rank.rank - 1) % n)]
    for number in range(rounds):
        posts = 0 if number else launches
        waits = rank.send(name, size * (n - 1) / rounds, neighbors, waits, posts)
    return waits
