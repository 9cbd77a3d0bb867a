"""Tensor-parallel linear layers as launches of one rank, in every variant.

The fused variants run the programs of :mod:`commfuse_npu.ops.linear`; the others are implemented
here.  Without sequence parallelism every rank has all rows: nothing is gathered, and products are
summed by an all-reduce, modeled as a reduce-scatter and an all-gather in one launch.

Legend: a *block* is the part of one rank: ``rows`` rows of ``n * rows``; ``inputs`` and ``outputs``
are the features of this rank's weight ``[outputs, inputs]``.

MC2's kernels are a gather before a GEMM, or a reduce-scatter after one, tile by tile of rows.
Read in hicann/ops-transformer@c29bc10, ``mc2``: a kernel divides a rank's block of rows into up to
16 tiles of 128 rows or more, and transfers one tile while it multiplies another.  The host chooses
the tiles by a formula of estimated times: long ones and a short one.  Here they are equal, in the
number that is the fastest by an estimate; over the 72 points of docs/layers_tables.md that is
between 5.6 % faster and 0.3 % slower than with the host's tiles.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from commfuse_npu.plan import Schedule, split
from commfuse_npu.plan.rules import ColumnBackward, GatherGemm, GemmScatter
from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.rank import Rank, rest, simulate
from commfuse_npu.tools.simulate.variants import MC2, MC2_RANKS

_INNER = range(256, 65535)
"""Supported inner dimensions."""
_ROUNDS = 4
"""Rounds of a transfer around a double ring of 4 to 32 ranks: for a small one the host
expects 74 to 95 us, whatever the number of ranks."""
_MOST_TILES = 16
_LEAST_ROWS = 128
"""Limits of the kernel: tiles of a block, and rows of a tile."""


def column(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """Gather blocks -> GEMM."""
    if not _fused(rank, name):
        _gather_gemm(rank, name, rows, inputs, outputs)
        return
    columns = {"shard": inputs, "weight": outputs, "out": outputs}
    rest(rank.run(name, GatherGemm(rows, inputs, outputs), columns))


def row(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """GEMM -> reduce-scatter of the product; later operations wait for the sums."""
    if _in_kernel(rank, name, _mc2_gemm_scatter, rows, inputs, outputs):
        return
    if not _fused(rank, name):
        _gemm_scatter(rank, name, rows, inputs, outputs)
        return
    columns = {"a": inputs, "weight": outputs, "out": outputs}
    rest(rank.run(name, GemmScatter(rows, inputs, outputs), columns))


def column_gradients(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> Iterator[None]:
    """dgrad -> reduce-scatter; second gather of the input -> wgrad.

    Yields at the point up to which it may start early: when fused, after the transfers of the input
    have started; otherwise at once.
    """
    if rank.lora:
        yield
        _gemm_scatter(rank, name, rows, outputs, inputs)
        return
    least = rank.variant.collectives_from
    if _fused(rank, name) and (least is None or outputs < least):
        rule = ColumnBackward(rows, inputs, outputs, True, True)
        columns = {"x": inputs, "grad": outputs, "weight": inputs, "grad_x": inputs}
        yield from rank.run(name, rule, columns)
        return
    yield
    waits = rank.gathered(f"{name} re-gather", rows * inputs)
    if rank.variant.kind == "plain":
        rank.need(waits)
    _gemm_scatter(
        rank, name, rows, outputs, inputs,
        lambda: rank.gemm(f"{name} wgrad", outputs, rows * rank.size, inputs, waits),
    )  # fmt: skip


def row_gradients(
    rank: Rank,
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    before: Iterator[None] | None = None,
) -> None:
    """Gradients arrive -> dgrad, then wgrad.

    Args:
        before: the backward of the preceding column-parallel layer, started before wgrad.
    """
    if rank.lora:
        if not _in_kernel(rank, name, _mc2_gather_gemm, rows, outputs, inputs):
            _gather_gemm(rank, name, rows, outputs, inputs)
        return
    if not _fused(rank, name):
        waits = _gather_gemm(rank, name, rows, outputs, inputs)
        rank.gemm(f"{name} wgrad", outputs, rows * rank.size, inputs, waits)
        return
    columns = {"shard": outputs, "weight": inputs, "out": inputs, "other": inputs}
    for _ in rank.run(name, GatherGemm(rows, outputs, inputs, inputs), columns):
        if before:
            next(before)


def _fused(rank: Rank, name: str) -> bool:
    return rank.size > 1 and rank.sequence_parallel and isinstance(rank.way(name), Schedule)


def _in_kernel(rank: Rank, name: str, part: Callable[..., Any], *sizes: int) -> bool:
    """Add MC2's kernel as one operation, if the layer is fused with its adapter."""
    lora = rank.lora
    runs = lora and lora.fused and lora.adapts(name) and _in_mc2(rank, sizes[1])
    if not runs or rank.variant.kind == "compute":
        return False
    kernel = simulate(rank.links, MC2, lambda own: part(own, name, *sizes), steady=True)
    rank.compute(name, kernel.device)
    return True


# ------------------------------------------------------------------------ without programs


def _slices(rank: Rank, operation: str, rows: int) -> list[int]:
    """Rows of a block in each slice; one slice with all rows if the variant does not slice."""
    slices = rank.way(operation)
    if not isinstance(slices, int) or rank.size == 1 or not rank.sequence_parallel:
        return [rows]
    return [stop - start for start, stop in pairwise(split(rows, slices))]


def _gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the gather and the GEMM; returns what to wait for until all rows have arrived."""
    kind = rank.variant.kind
    n = rank.size
    if kind == "kernel" and rank.sequence_parallel:
        whole = rank.machine.gemm(rows * n, inner, outer)
        rank.compute(name, rank.machine.coc_kernel(whole, rows * inner * ITEM_BYTES, n))
        return ()
    if kind == "mc2" and _in_mc2(rank, inner):
        return _mc2_gather_gemm(rank, name, rows, inner, outer)
    slices = _slices(rank, name, rows)
    arrivals = [rank.gathered(f"{name} gather", part * inner) for part in slices]
    for part, waits in zip(slices, arrivals, strict=True):
        rank.gemm(name, part * n, inner, outer, waits)
    if len(slices) > 1:
        # A slice holds rows of every block.
        rank.elementwise(f"{name} reorder", 2 * rows * n * outer)
    return arrivals[-1]


def _gemm_scatter(
    rank: Rank,
    name: str,
    rows: int,
    inner: int,
    outer: int,
    behind: Callable[[], None] | None = None,
) -> None:
    """Add the GEMM and the reduce-scatter; later operations wait for the sums.

    Args:
        behind: work that does not need the sums.  It hides the end of the transfers, except in the
            ``plain`` variants, which wait first.  With it there is no fused kernel.
    """
    kind = rank.variant.kind
    n = rank.size
    if kind == "kernel" and rank.sequence_parallel and not behind:
        whole = rank.machine.gemm(rows * n, inner, outer)
        rank.compute(name, rank.machine.coc_kernel(whole, rows * outer * ITEM_BYTES, n))
        return
    if kind == "mc2" and not behind and _in_mc2(rank, inner):
        _mc2_gemm_scatter(rank, name, rows, inner, outer)
        return
    slices = _slices(rank, name, rows)
    waits = tuple[int, ...]()
    if len(slices) > 1:
        rank.elementwise(f"{name} reorder", 2 * rows * n * inner)
    for part in slices:
        rank.gemm(name, part * n, inner, outer)
        waits = rank.summed(f"{name} scatter", part * outer)
    if kind == "plain":
        rank.need(waits)
        waits = ()
    if behind:
        behind()
    rank.need(waits)


# ------------------------------------------------------------------------ MC2


def _in_mc2(rank: Rank, inner: int) -> bool:
    """Whether there is a kernel for such a layer."""
    return rank.sequence_parallel and rank.size in MC2_RANKS and inner in _INNER


def _mc2_gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the kernel: the own block first, then tiles of the others as they arrive; one launch.

    Returns:
        What to wait for until all rows have arrived.
    """
    machine = rank.machine
    others = rank.size - 1
    own = machine.gemm(rows, inner, outer)
    layout = _mc2_layout(rank, inner, outer)

    def seconds(tiles: list[int]) -> float:
        time = layout + own
        arrived = 0.0
        for tile in tiles:
            arrived += _mc2_transfer_seconds(rank, tile * inner)
            time = max(time, arrived) + machine.gemm(others * tile, inner, outer, start=False)
        return time

    tiles = min(_tiles(rows), key=seconds)
    arrivals = [
        _mc2_transfer(rank, f"{name} gather", tile * inner, int(not number))
        for number, tile in enumerate(tiles)
    ]
    rank.compute(f"{name} layout of the weight", layout, launches=0)
    rank.compute(f"{name} own", own, launches=0)
    for tile, waits in zip(tiles, arrivals, strict=True):
        part = machine.gemm(others * tile, inner, outer, start=False)
        rank.compute(name, part, waits, launches=0)
    return arrivals[-1]


def _mc2_gemm_scatter(rank: Rank, name: str, rows: int, inner: int, outer: int) -> None:
    """Add the kernel: one tile of all blocks at a time, each followed by its transfer."""
    machine = rank.machine

    def seconds(tiles: list[int]) -> float:
        time = arrived = 0.0
        for tile in tiles:
            time += machine.gemm(rank.size * tile, inner, outer, start=False)
            arrived = max(arrived, time) + _mc2_transfer_seconds(rank, tile * outer, sums=True)
        return arrived

    tiles = min(_tiles(rows), key=seconds)
    waits = tuple[int, ...]()
    rank.compute(f"{name} layout of the weight", _mc2_layout(rank, inner, outer))
    for number, tile in enumerate(tiles):
        part = machine.gemm(rank.size * tile, inner, outer, start=not number)
        rank.compute(name, part, launches=0)
        waits = _mc2_transfer(rank, f"{name} scatter", tile * outer, 0, sums=True)
    rank.need(waits)


def _tiles(rows: int) -> list[list[int]]:
    """The rows of a block in tiles, for every number of tiles."""
    most = max(1, min(_MOST_TILES, rows // _LEAST_ROWS))
    cuts = (split(rows, count) for count in range(1, most + 1))
    return [[stop - start for start, stop in pairwise(cut)] for cut in cuts]


def _mc2_layout(rank: Rank, inner: int, outer: int) -> float:
    """Seconds of the layout conversion of the weight before a kernel."""
    return rank.machine.memory(2 * ITEM_BYTES * inner * outer)


def _ring_rounds(rank: Rank) -> int:
    """Number of rounds of a transfer around a ring; 0 where it is a plain collective."""
    ring = rank.machine.inside.topology != "full_mesh" and rank.size > 2
    return min(rank.size - 1, _ROUNDS) if ring else 0


def _mc2_transfer_seconds(rank: Rank, numbers: int, *, sums: bool = False) -> float:
    """About the seconds of :func:`_mc2_transfer`, beside a GEMM."""
    machine = rank.machine
    size = numbers * ITEM_BYTES
    factor = machine.summed(rank.size) if sums and not _ring_rounds(rank) else 1.0
    latency = machine.inside.latency
    seconds = machine.collective(size * factor, rank.size) - latency
    return seconds * machine.inside.beside_work + latency * max(1, _ring_rounds(rank))


def _mc2_transfer(
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
