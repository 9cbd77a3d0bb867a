"""MC2's kernels: a gather before a GEMM, or a reduce-scatter after one, tile by tile of rows.

The tiles follow the host's formula, a function of the shape alone, read in
hicann/ops-transformer@c29bc10, ``mc2``: ``common/src/matmul_performance.cpp``,
``hccl_performance.cpp`` and ``hccl_formulaic_tiling.cpp``, ``all_gather_formulaic_tiling.cpp`` and
``reduce_scatter_formulaic_tiling.cpp``; constants are taken from there.  The host estimates the
times of GEMM and transfer.  It divides a rank's block of rows into long tiles and a short one, such
that a tile's GEMM takes as long as the next one's transfer: at most 16 tiles, of 128 rows or more.
These estimates determine only the tiles; the time of a tile is this simulator's own.  Left out are
rules that change no time in ``docs/layers_tables.md``.

Legend: ``rows`` of a rank's block, GEMMs ``[.., inner] @ [inner, outer]``; microseconds, MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commfuse_npu.hardware.machine import ITEM_BYTES

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["RANKS", "Tiling", "gather_gemm", "gemm_scatter", "supports"]

RANKS = 2, 4, 8, 16, 32
"""Supported group sizes; a full mesh has up to 8 (``VALID_RANK``)."""
_INNER = range(256, 65535)
"""Supported inner dimensions."""
_CORES = 20
"""Cube cores if the description does not give them."""
_ROUNDS = 4

_ALIGN, _COLUMNS = 128, 256
_MOST = 16
_MIB = 2**20


def supports(rank: Rank, inner: int) -> bool:
    """Whether there is a kernel for such a layer."""
    return rank.sequence_parallel and rank.size in RANKS and inner in _INNER


def _tiling(rank: Rank, gather: bool, rows: int, inner: int, outer: int) -> Tiling:
    machine = rank.machine
    ring, ordered = machine.inside.topology != "full_mesh", machine.ordered_sums > 0
    cores = machine.cores or _CORES
    return Tiling(gather, rows, inner, outer, rank.size, cores, ring, ordered)


def _transfer(
    rank: Rank, cut: Tiling, name: str, numbers: int, launches: int, *, sums: bool
) -> tuple[int, ...]:
    """Transfer ``numbers`` elements per block over a full mesh, or around a double ring.

    For a ring, the host's formula gives 74 to 95 us for any small transfer of 4 to 32 ranks, which
    fits a constant number of rounds.
    """
    # Besides other work, large operands slow transfers: as in the host's formula, or less.
    size = numbers * ITEM_BYTES * (1 + rank.machine.mc2_grows * (cut.slowed - 1))
    if not cut.ring or rank.size == 2:
        return rank.collective(name, size, launches=launches, sums=sums)
    n, waits = rank.size, tuple[int, ...]()
    rounds = min(n - 1, _ROUNDS)
    neighbors = [((rank.rank + 1) % n, (rank.rank - 1) % n)]
    for number in range(rounds):
        part, posts = size * (n - 1) / rounds, launches * (not number)
        waits = rank.send(name, part, neighbors, waits, posts)
    return waits


def _convert(rank: Rank, name: str, inner: int, outer: int, launches: int) -> None:
    """Add the conversion of the weight's layout, before its first use."""
    seconds = rank.machine.memory(2 * ITEM_BYTES * inner * outer)
    rank.compute(f"{name} layout of the weight", seconds, launches=launches)


def gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the kernel: the own block first, then tiles of the others as they arrive; one launch.

    Returns:
        What to wait for until all rows have arrived.
    """
    machine, cut = rank.machine, _tiling(rank, True, rows, inner, outer)
    tiles = cut.tiles()
    arrivals = [
        _transfer(rank, cut, f"{name} gather", tile * inner, int(not number), sums=False)
        for number, tile in enumerate(tiles)
    ]
    _convert(rank, name, inner, outer, 0)
    rank.compute(f"{name} own", machine.gemm(rows, inner, outer), launches=0)
    for tile, waits in zip(tiles, arrivals, strict=True):
        seconds = machine.gemm((rank.size - 1) * tile, inner, outer, start=False)
        rank.compute(name, seconds, waits, launches=0)
    return arrivals[-1]


def gemm_scatter(rank: Rank, name: str, rows: int, inner: int, outer: int) -> None:
    """Add the kernel: one tile of all blocks at a time, each followed by its transfer."""
    cut, waits = _tiling(rank, False, rows, inner, outer), tuple[int, ...]()
    _convert(rank, name, inner, outer, 1)
    for number, tile in enumerate(cut.tiles()):
        seconds = rank.machine.gemm(rank.size * tile, inner, outer, start=not number)
        rank.compute(name, seconds, launches=0)
        waits = _transfer(rank, cut, f"{name} scatter", tile * outer, 0, sums=True)
    rank.need(waits)


# ------------------------------------------------------------------------ the host's formula


@dataclass
class Tiling:
    """An all-gather before a GEMM, or a reduce-scatter after one, that the host cuts into tiles.

    Attributes:
        rows: of a rank's block.
        cores: cube cores of the NPU.
        ring: whether transfers go around a double ring (A3) instead of over a full mesh (A2).
        ordered: whether a mesh adds in a fixed order (``HCCL_DETERMINISTIC``).
        slowed: factor by which the host lengthens transfers for large operands, besides 1.15.
    """

    gather: bool
    rows: int
    inner: int
    outer: int
    ranks: int
    cores: int
    ring: bool = False
    ordered: bool = False
    slowed: float = 1.0

    def __post_init__(self) -> None:
        gather, ranks, weight = self.gather, self.ranks, self.inner * self.outer
        # Blocks in a tile's GEMM; a gather computes its own block before the tiles.
        self.blocks = ranks - 1 if gather else ranks
        self.row_bytes = (self.inner if gather else self.outer) * ranks * ITEM_BYTES
        self.least = self._linear(ranks if gather and not self.ring else self.blocks)
        efficiency, self.longest = self._efficiency(self.least, self.blocks)
        self.row_time = weight / (4096 * 1.8 * 1024 * self.cores * efficiency)
        self.own = self.rows * self.row_time * efficiency / self._efficiency(self.rows, 1)[0]
        large = self.inner >= 8192 and self.outer > 5120
        if self.blocks > 2 and (efficiency < 0.85 or large):
            factors = (3.0, 1.5) if efficiency < 0.85 else (1.5, 1.2)
            self.slowed = factors[not gather]
        self.scale = 1.75 * ranks / (ranks - 1) / 0.6 if self.ring else ranks / 4
        if self.ordered and not self.ring:
            self.scale /= 1 + 0.4 * ranks / 8
        self.scale /= self.slowed * 1.15

    def tiles(self) -> tuple[int, ...]:
        """Rows of a block in each tile, in order."""
        gather, rows, ranks, blocks, least = (
            self.gather, self.rows, self.ranks, self.blocks, self.least,
        )  # fmt: skip
        # Around a ring of more than two ranks both are estimated for all blocks.
        whole = self.ring and ranks > 2
        time = rows * (blocks if whole else 1) * ranks * self.row_time
        wire = self._wire(rows * (ranks if whole else 1))
        behind = time >= wire
        bound = gather and wire > 2 * time and self.inner >= 8192
        few_rows = gather and not behind and rows < 2 * least and blocks > 2
        large = not gather and wire > 1.5 * time and self.outer >= 4096 and self.inner >= 1024
        if few_rows or large or (bound and not self.ring):
            least = _ALIGN
        if not gather and 2 * wire <= time < 3 * wire:
            least = max(least, 4 * _MIB // self.outer // blocks)
        if (gather and wire < self.own) or rows < 2 * least:
            return (rows,)
        if behind:
            own = gather and ranks > 2
            long = self._rows_sent_in(self.own if own else least * blocks * self.row_time)
        else:
            long = int(self._wire(least) / (blocks * self.row_time))
            long = min(max(_ALIGN, long), least if bound else rows)
        count, long, short = self._fit(long, least, behind)
        tail = (short,) if short else ()
        return (*[long] * count, *tail) if gather or behind else (*tail, *[long] * count)

    # ------------------------------------------------------------------- estimates

    def _linear(self, blocks: int) -> int:
        """Number of rows from which the time of a GEMM is proportional to them."""
        weight = self.outer * self.inner
        if blocks > 2:
            return max(10 * 2**30 // (weight * blocks), _ALIGN)
        work, traffic = (size // 20 * self.cores for size in (4 * 2**30, 6 * _MIB))
        least = max(work // weight, traffic // (weight // 1024 + self.outer))
        return max(3 * _ALIGN, least // blocks)

    def _efficiency(self, rows: int, blocks: int) -> tuple[float, int]:
        """Share of peak FLOP/s, by the operands that a round reads; and the longest tile."""
        cores, row = self.cores, self.inner * ITEM_BYTES
        down, across = math.ceil(rows / _ALIGN) * blocks, math.ceil(self.outer / _COLUMNS)
        read = (min(down, cores) * _ALIGN + min(across, cores) * _COLUMNS) * row // _MIB
        limits = ((128, 0.85), (192, 0.75), (math.inf, 0.65))
        full, share = next((full, share) for full, share in limits if read <= full)
        more = (min(down + blocks, cores) - min(down, cores)) * _ALIGN * row // _MIB
        cut = read <= 192 and more > full - read and across > cores
        return share, math.ceil(rows / _ALIGN) * _ALIGN if cut else self.rows

    def _wire(self, rows: int) -> float:
        """Microseconds of the transfer of so many rows."""
        size = rows * self.row_bytes / _MIB
        if self.ring:
            return (11.38154641 * size + 248.151561) / self.scale
        if size > 8:
            return (13.58491263 * size + 61.508333) / self.scale
        return (-0.9698202 * size**2 + 27.0622573 * size + 14.769) / self.scale

    def _rows_sent_in(self, microseconds: float) -> int:
        """Rows whose transfer takes so long: the inverse of :meth:`_wire` for large ones."""
        slope, start = (11.38154641, 248.151561) if self.ring else (13.58491263, 61.508333)
        return int((microseconds * self.scale - start) / slope * _MIB) // self.row_bytes

    # ------------------------------------------------------------------- whole tiles

    def _fit(self, long: int, short: int, behind: bool) -> tuple[int, int, int]:
        """Number of long tiles, their rows, and rows of the short tile (0 if there is none)."""
        rows, least = self.rows, max(_ALIGN, short)
        long = min(max(long, short), rows - short)
        up = long % _ALIGN > _ALIGN * (0.5 if behind else 0.75)
        long = min(long // _ALIGN * _ALIGN + _ALIGN * up, self.longest)
        count, shorts = max(1, (rows - int(short * 0.75)) // long), 1
        spare = rows - count * long - short
        large = spare >= short and 2 * short >= long
        if large and (self.inner * self.outer >= 32 * _MIB or not behind) and count <= 2:
            long, large = short, False
            count = max(1, (rows - short) // long)
        if count == 1 and not self.gather:
            remainder = rows - long
            if remainder > 2 * short:
                long += (remainder - short) // 2 // _ALIGN * _ALIGN
            shorts, large = int(rows != long), False
        if large and long <= short + spare:
            count += 1
            shorts = int(rows != count * long)
        if count + shorts > _MOST:
            parts = _MOST if rows % (_MOST * _ALIGN) == 0 else _MOST - 1
            long = min(rows, math.ceil(rows // parts / _ALIGN) * _ALIGN)
            count = rows // long
            shorts = int(rows != count * long)
        short = rows - count * long
        if long > 1024:
            short = math.ceil(short / _ALIGN) * _ALIGN
            long = math.ceil((rows - short) / count)
            return count, long, rows - count * long
        if 0 < short < least and long >= max(short + _ALIGN * count, 2 * least + 1):
            long, short = long - _ALIGN, short + _ALIGN * count
        total = count + shorts
        if short > long and rows // total > _ALIGN * total:
            long = math.ceil(rows // total / _ALIGN) * _ALIGN
            short = rows - count * long
        return count, long, short
