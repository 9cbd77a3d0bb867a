"""The row tiles of MC2's kernels: the host's tiling formula, a function of the shape alone.

Read in hicann/ops-transformer@c29bc10, ``mc2``: ``common/src/matmul_performance.cpp``,
``hccl_performance.cpp`` and ``hccl_formulaic_tiling.cpp``, ``all_gather_formulaic_tiling.cpp`` and
``reduce_scatter_formulaic_tiling.cpp``; constants are taken from there.  The host estimates the
times of GEMM and transfer.  It divides a rank's block of rows into long tiles and a short one, such
that a tile's GEMM takes as long as the next one's transfer: at most 16 tiles, of 128 rows or more.
These estimates determine only the tiling; the time of a tile is this simulator's own
(:mod:`commfuse_npu.tools.simulate.linear`).

Legend: ``rows`` of a rank's block, GEMMs ``[.., inner] @ [inner, outer]``; microseconds, MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES

__all__ = ["INNER", "RANKS", "Tiling", "tiling"]

RANKS = 2, 4, 8, 16, 32
"""Supported group sizes; a full mesh has up to 8 (``VALID_RANK``)."""
INNER = 256, 65535
"""Supported inner dimensions: from the first value, below the second."""

_ALIGN, _COLUMNS = 128, 256
_MOST, _MOST_SLOWED = 16, 8
_MIB = 2**20


class Tiling(NamedTuple):
    """The host's decision.

    Attributes:
        rows: rows of a block in each tile, in order.
        slowed: factor by which the host lengthens transfers for large operands, besides 1.15.
    """

    rows: tuple[int, ...]
    slowed: float


def tiling(
    kind: Literal["gather", "scatter"],
    rows: int,
    inner: int,
    outer: int,
    ranks: int,
    cores: int,
    *,
    ring: bool = False,
    ordered: bool = False,
) -> Tiling:
    """The tiles of an all-gather before a GEMM, or of a reduce-scatter after one.

    Args:
        cores: cube cores of the NPU.
        ring: whether transfers go around a double ring (A3) instead of over a full mesh (A2).
        ordered: whether sums have a fixed order (``HCCL_DETERMINISTIC``, on a mesh).
    """
    problem = _Problem(kind, rows, inner, outer, ranks, cores, ring, ordered and not ring)
    return Tiling(problem.tiles(), problem.slowed)


@dataclass
class _Problem:
    kind: Literal["gather", "scatter"]
    rows: int
    inner: int
    outer: int
    ranks: int
    cores: int
    ring: bool
    ordered: bool

    def __post_init__(self) -> None:
        gather = self.kind == "gather"
        # Blocks in a tile's GEMM; a gather computes its own block before the tiles.
        self.blocks = self.ranks - 1 if gather else self.ranks
        self.width = self.inner if gather else self.outer
        self.align = _ALIGN
        linear = self._linear(self.ranks if gather and not self.ring else self.blocks)
        self.least = max(_ALIGN, 2**16 // (self.width * self.ranks * ITEM_BYTES), linear)
        self.most = _MOST
        self.efficiency, self.longest = self._efficiency(self.least, self.blocks)
        work = max(_ALIGN, self.outer) * max(_ALIGN, self.inner)
        self.row_time = work / (4096 * 1.8 * 1024 * self.cores * self.efficiency)
        self.scale = 1.75 * self.ranks / (self.ranks - 1) if self.ring else self.ranks / 4
        if self.ordered:
            self.scale /= 1 + 0.4 * self.ranks / 8
        large = self.inner >= 8192 and self.outer > 5120
        self.slowed = 1.0
        if self.ranks > 2 and self.blocks > 2:
            if self.efficiency < 0.85:
                self.slowed = 3.0 if gather else 1.5
            elif large:
                self.slowed = 1.5 if gather else 1.2
        if gather and self.slowed > 1 and not 2048 < self.rows <= 4096:
            self.most = _MOST_SLOWED
        self.scale /= self.slowed * 1.15 * (0.6 if self.ring else 1.0)
        # Around a ring of more than two ranks both are estimated for all blocks.
        whole = self.ring and self.ranks > 2
        self.gemm = self._gemm(self.rows * (self.blocks if whole else 1), self.ranks)
        self.wire = self._wire(self.rows * (self.ranks if whole else 1))

    def tiles(self) -> tuple[int, ...]:
        gather, behind = self.kind == "gather", self.gemm >= self.wire
        own, _ = self._efficiency(self.rows, 1)
        front = self._gemm(self.rows, 1) * self.efficiency / own
        bound = gather and self.wire > 2 * self.gemm and self.inner >= 8192
        uncut = gather and self.wire < front and self.rows <= self.longest and self.inner <= 32768
        if gather:
            few_rows = not behind and self.rows < 2 * self.least and self.blocks > 2
            if few_rows or (bound and not self.ring):
                if self.outer > 2048 and self.rows <= 512:
                    self.align //= 2
                self.least = min(self.least, self.align)
        else:
            self._shortest_of_scatter()
        if uncut or self.rows < 2 * self.least:
            return (self.rows,)
        if behind:
            hiding = front if gather and self.ranks > 2 else self._gemm(self.least, self.blocks)
            long = self._rows_sent_in(hiding)
        else:
            long = int(self._wire(self.least) / (self.blocks * self.row_time))
            long = min(max(_ALIGN, long), self.least if bound else self.rows)
        count, long, short = self._fit(long, behind)
        tail = [short] if short else []
        return tuple([*[long] * count, *tail] if gather or behind else [*tail, *[long] * count])

    def _shortest_of_scatter(self) -> None:
        ratio = max(self.gemm, self.wire) / min(self.gemm, self.wire)
        if self.wire > 1.5 * self.gemm and self.outer >= 4096 and self.inner >= 1024:
            self.least = min(self.least, self.align)
        longer = self.gemm > 1.5 * self.wire and self.rows >= 4 * self.align
        if self.ordered and self.outer <= 4096 and (ratio < 1.15 or longer):
            self.least = max(self.least, 2 * self.align)
        if 2 * self.wire <= self.gemm < 3 * self.wire:
            self.least = max(self.least, 4 * _MIB // self.outer // self.blocks)

    # ------------------------------------------------------------------- estimates

    def _linear(self, blocks: int) -> int:
        """Number of rows from which the time of a GEMM is proportional to them."""
        weight = max(_ALIGN, self.outer) * max(_ALIGN, self.inner)
        if blocks > 2:
            return max(10 * 2**30 // (weight * blocks), _ALIGN)
        work, traffic = (size // 20 * self.cores for size in (4 * 2**30, 6 * _MIB))
        least = max(work // weight, traffic // (weight // 1024 + max(_ALIGN, self.outer)))
        return max(3 * _ALIGN, least // blocks)

    def _efficiency(self, rows: int, blocks: int) -> tuple[float, int]:
        """Share of peak FLOP/s, by the operands that a round reads; and the longest tile."""
        high, wide = min(_ALIGN, rows), _COLUMNS
        down, across = math.ceil(rows / high) * blocks, math.ceil(self.outer / wide)
        row = self.inner * ITEM_BYTES
        edges = min(down, self.cores) * high + min(across, self.cores) * wide
        read = edges * row // _MIB
        limits = ((128, 0.85), (192, 0.75), (math.inf, 0.65))
        full, share = next((full, share) for full, share in limits if read <= full)
        share *= min(down * across, self.cores) / self.cores
        more = min(down + blocks, self.cores) - min(down, self.cores)
        more = more * high * row // _MIB
        if read <= 192 and more > full - read and across > self.cores:
            return share, math.ceil(rows / _ALIGN) * _ALIGN
        return share, self.rows

    def _gemm(self, rows: int, blocks: int) -> float:
        return max(_ALIGN, rows) * blocks * self.row_time

    def _wire(self, rows: int) -> float:
        size = rows * self.width * self.ranks * ITEM_BYTES / _MIB
        if self.ring:
            raw = 11.38154641 * size + 248.151561 if size > 2 else 250.0
        elif size > 8:
            raw = 13.58491263 * size + 61.508333
        elif size > 1 / 16:
            raw = -0.9698202 * size**2 + 27.0622573 * size + 14.769
        else:
            raw = 18.0
        return raw / self.scale

    def _rows_sent_in(self, microseconds: float) -> int:
        """Rows whose transfer takes so long: the inverse of :meth:`_wire`."""
        raw = microseconds * self.scale
        if self.ring:
            size = (raw - 248.151561) / 11.38154641 if raw > 250 else 2.0
        elif raw > 170:
            size = (raw - 61.508333) / 13.58491263
        elif raw > 18:
            size = 13.9522034 - math.sqrt(-1.03111896 * (raw - 203.558059))
        else:
            size = 1 / 16
        return int(size * _MIB) // (self.width * self.ranks * ITEM_BYTES)

    # ------------------------------------------------------------------- whole tiles

    def _fit(self, long: int, behind: bool) -> tuple[int, int, int]:
        """Number of long tiles, their rows, and rows of the short tile (0 if there is none)."""
        rows, align, short = self.rows, self.align, self.least
        long = min(max(long, short), rows - short)
        down = long // align * align
        narrow = self.outer < 2048 or self.inner < 2048
        up = long - down > align * (0.5 if behind else 0.75)
        long = down + align if up or (self.ranks == 2 and behind and narrow) else down
        long = min(long, self.longest)
        count, shorts = max(1, (rows - int(short * 0.75)) // long), 1
        spare = rows - count * long - short
        large = spare >= short and 2 * short >= long
        even = (self.inner * self.outer >= 32 * _MIB and short >= align) or not behind
        if large and even and count <= 2:
            long, large = short, False
            count = max(1, (rows - short) // long)
        if count + shorts == 2 and self.kind == "scatter":
            remainder = rows - count * long
            if remainder > 2 * short:
                long += (remainder - short) // 2 // align * align
            count, shorts = self._behind(count, long)
            large = False
        if large and long <= short + spare:
            count, shorts = self._behind(count + 1, long)
        if count + shorts > self.most and rows % (self.most * align) == 0:
            count, long, shorts = self.most, rows // self.most, 0
        if count + shorts > self.most:
            long = min(rows, math.ceil(rows // (self.most - 1) / align) * align)
            count, shorts = self._behind(rows // long, long)
        short = rows - count * long
        if long > 1024:
            short = math.ceil(short / align) * align
            long = math.ceil((rows - short) / count)
            return count, long, rows - count * long
        small = 0 < short < max(align, self.least) and long > 2 * max(align, self.least)
        if small and short + align * count <= long:
            long, short = long - align, short + align * count
        total = count + shorts
        if short > long and rows // total > align * total:
            long = math.ceil(rows // total / align) * align
            short = rows - count * long
        return count, long, short

    def _behind(self, count: int, long: int) -> tuple[int, int]:
        """Numbers of long and short tiles; a remainder that is too short joins the last tile."""
        remainder = self.rows - count * long
        if 0 < remainder < self.align / 2 and count > 1:
            return count - 1, 1
        return count, int(remainder != 0)
