"""MC2's kernels: a gather before a GEMM, or a reduce-scatter after one, tile by tile of rows.

The tiles follow the host's formula, a function of the shape alone, read in
hicann/ops-transformer@c29bc10, ``mc2``: ``common/src/matmul_performance.cpp``,
``hccl_performance.cpp`` and ``hccl_formulaic_tiling.cpp``, ``all_gather_formulaic_tiling.cpp`` and
``reduce_scatter_formulaic_tiling.cpp``; constants are taken from there.  The host estimates the
times of GEMM and transfer.  It divides a rank's block of rows into long tiles and a short one, such
that a tile's GEMM takes as long as the next one's transfer: at most 16 tiles, of 128 rows or more.
These estimates determine only the tiles; the time of a tile is this simulator's own.  Left out are
rules that change no layer of 30 published models on 2 to 32 ranks (131,157 settings).

Legend: ``rows`` of a rank's block, GEMMs ``[.., inner] @ [inner, outer]``; microseconds, MiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.rank import Rank

RANKS = 2, 4, 8, 16, 32
"""Supported group sizes; a full mesh has up to 8 (``VALID_RANK``)."""
_INNER = range(256, 65535)
"""Supported inner dimensions."""
_CORES = 20
"""Cube cores if the description does not give them."""
_ROUNDS = 4

_ALIGN, _COLUMNS = 128, 256
_MOST, _MOST_SLOWED = 16, 8
_MIB = 2**20

Kind = Literal["gather", "scatter"]


def supports(rank: Rank, inner: int) -> bool:
    """Whether there is a kernel for such a layer."""
    return rank.sequence_parallel and rank.size in RANKS and inner in _INNER


class _Kernel:
    """The tiles that the host chooses, and a layout conversion of the weight."""

    def __init__(self, rank: Rank, kind: Kind, rows: int, inner: int, outer: int) -> None:
        machine, self.rank = rank.machine, rank
        self.ring = machine.inside.topology != "full_mesh"
        cut = tiling(kind, rows, inner, outer, rank.size, machine.cores or _CORES, ring=self.ring,
                     ordered=machine.ordered_sums > 0)  # fmt: skip
        self.rows = cut.rows
        # Factor on transfers, besides that of other work: MC2's own tiling formula's, or less.
        self.slowed = 1 + machine.mc2_grows * (cut.slowed - 1)
        self.layout = machine.memory(2 * ITEM_BYTES * inner * outer)

    def transfer(self, name: str, numbers: int, launches: int, *, sums: bool) -> tuple[int, ...]:
        """Transfer ``numbers`` elements per block over a full mesh, or around a double ring.

        For a ring, the host's formula gives 74 to 95 us for any small transfer of 4 to 32 ranks,
        which fits a constant number of rounds.
        """
        rank, size = self.rank, numbers * ITEM_BYTES * self.slowed
        if not self.ring or rank.size == 2:
            return rank.collective(name, size, launches=launches, sums=sums)
        n, waits = rank.size, tuple[int, ...]()
        rounds = min(n - 1, _ROUNDS)
        neighbors = [((rank.rank + 1) % n, (rank.rank - 1) % n)]
        for number in range(rounds):
            part, posts = size * (n - 1) / rounds, launches * (not number)
            waits = rank.send(name, part, neighbors, waits, posts)
        return waits


def gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the kernel: the own block first, then tiles of the others as they arrive; one launch.

    Returns:
        What to wait for until all rows have arrived.
    """
    machine, kernel = rank.machine, _Kernel(rank, "gather", rows, inner, outer)
    arrivals = [
        kernel.transfer(f"{name} gather", tile * inner, int(not number), sums=False)
        for number, tile in enumerate(kernel.rows)
    ]
    rank.compute(f"{name} layout of the weight", kernel.layout, launches=0)
    rank.compute(f"{name} own", machine.gemm(rows, inner, outer), launches=0)
    for tile, waits in zip(kernel.rows, arrivals, strict=True):
        seconds = machine.gemm((rank.size - 1) * tile, inner, outer, start=False)
        rank.compute(name, seconds, waits, launches=0)
    return arrivals[-1]


def gemm_scatter(rank: Rank, name: str, rows: int, inner: int, outer: int) -> None:
    """Add the kernel: one tile of all blocks at a time, each followed by its transfer."""
    kernel, waits = _Kernel(rank, "scatter", rows, inner, outer), tuple[int, ...]()
    rank.compute(f"{name} layout of the weight", kernel.layout)
    for number, tile in enumerate(kernel.rows):
        seconds = rank.machine.gemm(rank.size * tile, inner, outer, start=not number)
        rank.compute(name, seconds, launches=0)
        waits = kernel.transfer(f"{name} scatter", tile * outer, 0, sums=True)
    rank.need(waits)


# ------------------------------------------------------------------------ the host's formula


class Tiling(NamedTuple):
    """The host's decision.

    Attributes:
        rows: rows of a block in each tile, in order.
        slowed: factor by which the host lengthens transfers for large operands, besides 1.15.
    """

    rows: tuple[int, ...]
    slowed: float


def tiling(
    kind: Kind,
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
    problem = _Problem(kind == "gather", rows, inner, outer, ranks, cores, ring)
    return problem.tiling(ordered and not ring)


@dataclass
class _Problem:
    gather: bool
    rows: int
    inner: int
    outer: int
    ranks: int
    cores: int
    ring: bool

    def tiling(self, ordered: bool) -> Tiling:
        gather, rows, ranks, ring = self.gather, self.rows, self.ranks, self.ring
        # Blocks in a tile's GEMM; a gather computes its own block before the tiles.
        blocks = ranks - 1 if gather else ranks
        self.row_bytes = (self.inner if gather else self.outer) * ranks * ITEM_BYTES
        align = _ALIGN
        linear = self._linear(ranks if gather and not ring else blocks)
        least = max(_ALIGN, 2**16 // self.row_bytes, linear)
        efficiency, self.longest = self._efficiency(least, blocks)
        work = max(_ALIGN, self.outer) * max(_ALIGN, self.inner)
        row_time = work / (4096 * 1.8 * 1024 * self.cores * efficiency)

        def gemm(rows: int, blocks: int) -> float:
            return max(_ALIGN, rows) * blocks * row_time

        slowed = 1.0
        if blocks > 2 and efficiency < 0.85:
            slowed = 3.0 if gather else 1.5
        elif blocks > 2 and self.inner >= 8192 and self.outer > 5120:
            slowed = 1.5 if gather else 1.2
        self.scale = 1.75 * ranks / (ranks - 1) if ring else ranks / 4
        if ordered:
            self.scale /= 1 + 0.4 * ranks / 8
        self.scale /= slowed * 1.15 * (0.6 if ring else 1.0)
        # Around a ring of more than two ranks both are estimated for all blocks.
        whole = ring and ranks > 2
        time = gemm(rows * (blocks if whole else 1), ranks)
        wire = self._wire(rows * (ranks if whole else 1))
        behind = time >= wire
        front = gemm(rows, 1) * efficiency / self._efficiency(rows, 1)[0]
        bound = gather and wire > 2 * time and self.inner >= 8192
        few_rows = gather and not behind and rows < 2 * least and blocks > 2
        if few_rows or (bound and not ring):
            if self.outer > 2048 and rows <= 512:
                align //= 2
            least = min(least, align)
        if not gather and wire > 1.5 * time and self.outer >= 4096 and self.inner >= 1024:
            least = min(least, align)
        if ordered and not gather and self.outer <= 4096:
            alike = max(time, wire) < 1.15 * min(time, wire)
            if alike or (time > 1.5 * wire and rows >= 4 * align):
                least = max(least, 2 * align)
        if not gather and 2 * wire <= time < 3 * wire:
            least = max(least, 4 * _MIB // self.outer // blocks)
        if (gather and wire < front) or rows < 2 * least:
            return Tiling((rows,), slowed)
        if behind:
            hiding = front if gather and ranks > 2 else gemm(least, blocks)
            long = self._rows_sent_in(hiding)
        else:
            long = int(self._wire(least) / (blocks * row_time))
            long = min(max(_ALIGN, long), least if bound else rows)
        limited = gather and slowed > 1 and not 2048 < rows <= 4096
        most = _MOST_SLOWED if limited else _MOST
        count, long, short = self._fit(long, least, align, behind, most)
        tail = [short] if short else []
        order = [*[long] * count, *tail] if gather or behind else [*tail, *[long] * count]
        return Tiling(tuple(order), slowed)

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
        high, cores = min(_ALIGN, rows), self.cores
        down, across = math.ceil(rows / high) * blocks, math.ceil(self.outer / _COLUMNS)
        row = self.inner * ITEM_BYTES
        read = (min(down, cores) * high + min(across, cores) * _COLUMNS) * row // _MIB
        limits = ((128, 0.85), (192, 0.75), (math.inf, 0.65))
        full, share = next((full, share) for full, share in limits if read <= full)
        more = (min(down + blocks, cores) - min(down, cores)) * high * row // _MIB
        cut = read <= 192 and more > full - read and across > cores
        longest = math.ceil(rows / _ALIGN) * _ALIGN if cut else self.rows
        return share * min(down * across, cores) / cores, longest

    def _wire(self, rows: int) -> float:
        size = rows * self.row_bytes / _MIB
        if self.ring:
            raw = 11.38154641 * size + 248.151561 if size > 2 else 250.0
        elif size > 8:
            raw = 13.58491263 * size + 61.508333
        else:
            raw = -0.9698202 * size**2 + 27.0622573 * size + 14.769
        return raw / self.scale

    def _rows_sent_in(self, microseconds: float) -> int:
        """Rows whose transfer takes so long: the inverse of :meth:`_wire`."""
        raw = microseconds * self.scale
        if self.ring:
            size = (raw - 248.151561) / 11.38154641
        elif raw > 170:
            size = (raw - 61.508333) / 13.58491263
        else:
            size = 13.9522034 - math.sqrt(1.03111896 * (203.558059 - raw))
        return int(size * _MIB) // self.row_bytes

    # ------------------------------------------------------------------- whole tiles

    def _fit(
        self, long: int, short: int, align: int, behind: bool, most: int
    ) -> tuple[int, int, int]:
        """Number of long tiles, their rows, and rows of the short tile (0 if there is none)."""
        rows, least = self.rows, max(align, short)
        long = min(max(long, short), rows - short)
        narrow = self.ranks == 2 and behind and min(self.inner, self.outer) < 2048
        up = narrow or long % align > align * (0.5 if behind else 0.75)
        long = min(long // align * align + align * up, self.longest)
        count, shorts = max(1, (rows - int(short * 0.75)) // long), 1
        spare = rows - count * long - short
        large = spare >= short and 2 * short >= long
        if large and (self.inner * self.outer >= 32 * _MIB or not behind) and count <= 2:
            long, large = short, False
            count = max(1, (rows - short) // long)
        if count == 1 and not self.gather:
            remainder = rows - long
            if remainder > 2 * short:
                long += (remainder - short) // 2 // align * align
            shorts, large = int(rows != long), False
        if large and long <= short + spare:
            count += 1
            shorts = int(rows != count * long)
        if count + shorts > most:
            parts = most if rows % (most * align) == 0 else most - 1
            long = min(rows, math.ceil(rows // parts / align) * align)
            count = rows // long
            shorts = int(rows != count * long)
        short = rows - count * long
        if long > 1024:
            short = math.ceil(short / align) * align
            long = math.ceil((rows - short) / count)
            return count, long, rows - count * long
        if 0 < short < least and long >= max(short + align * count, 2 * least + 1):
            long, short = long - align, short + align * count
        total = count + shorts
        if short > long and rows // total > align * total:
            long = math.ceil(rows // total / align) * align
            short = rows - count * long
        return count, long, short
