"""Tensor-parallel linear layers as launches of one rank, in every variant.

The fused variants run the programs of :mod:`commfuse_npu.ops.linear`; the others are implemented
here.  Without sequence parallelism every rank has all rows: nothing is gathered, and products are
summed by an all-reduce, modeled as a reduce-scatter and an all-gather in one launch.

Legend: a *block* is the part of one rank: ``rows`` rows of ``n * rows``; ``inputs`` and ``outputs``
are the features of this rank's weight ``[outputs, inputs]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES
from commfuse_npu.plan import Schedule, split
from commfuse_npu.plan.instructions import Compute
from commfuse_npu.plan.rules import Wgrad, column_backward, gather_gemm, gemm_scatter
from commfuse_npu.tools.simulate.mc2 import INNER, RANKS, tiling
from commfuse_npu.tools.simulate.rank import Rank, Width, Work, rest
from commfuse_npu.tools.simulate.variants import Kind

__all__ = ["column", "column_gradients", "row", "row_gradients"]


def column(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """Gather blocks -> GEMM."""
    if not _fused(rank, name):
        _gather_gemm(rank, name, rows, inputs, outputs)
        return
    program = gather_gemm(rank.spec(name), rows, inputs, outputs, None, 0)
    columns = {"shard": inputs, "weight": outputs, "out": outputs}
    rest(rank.run(name, program, columns, {"gemm": _gemm(rank)}))


def row(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """GEMM -> reduce-scatter of the product; later operations wait for the sums."""
    if not _fused(rank, name):
        _gemm_scatter(rank, name, rows, inputs, outputs, kernel=True)
        return
    program = gemm_scatter(rank.spec(name), rows, inputs, outputs)
    columns = {"a": inputs, "weight": outputs, "out": outputs}
    rest(rank.run(name, program, columns, {"gemm": _gemm(rank)}))


def column_gradients(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> Iterator[None]:
    """dgrad -> reduce-scatter; second gather of the input -> wgrad.

    Yields at the point up to which it may start early: when fused, after the transfers of the input
    have started; otherwise at once.
    """
    least = rank.variant.collectives_from
    if _fused(rank, name) and (least is None or outputs < least):
        spec = rank.spec(name)
        program = column_backward(spec, rows, inputs, outputs, True, True)
        columns = {"x": inputs, "grad": outputs, "weight": inputs, "grad_x": inputs}
        # The columns of a weight are not contiguous in memory.
        strided = len(spec.schedule.runs(inputs, "last")) > 1
        works = {
            "gemm": _gemm(rank, ITEM_BYTES if strided else 0),
            "wgrad": _wgrad(rank, rows * rank.size),
        }
        yield from rank.run(name, program, columns, works)
        return
    yield
    waits = _gathered(rank, f"{name} re-gather", rows * inputs)
    if rank.variant.kind == "plain":
        rank.need(waits)

    def behind() -> None:
        seconds = rank.machine.gemm(outputs, rows * rank.size, inputs)
        rank.compute(f"{name} wgrad", seconds, waits)

    # A fused kernel has no form for this backward.
    _gemm_scatter(rank, name, rows, outputs, inputs, kernel=False, behind=behind)


def row_gradients(
    rank: Rank,
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    before: Iterator[None] | None = None,
) -> None:
    """Gradients arrive -> dgrad, then wgrad: one for all rows, or one per block.

    Args:
        before: the backward of the preceding column-parallel layer, started before the last wgrad.
    """
    whole = rows * rank.size
    if _fused(rank, name):
        wgrad_by: Wgrad = "blocks" if rank.variant.rounded else "whole"
        program = gather_gemm(rank.spec(name), rows, outputs, inputs, wgrad_by, inputs)
        remaining = program.count(Compute, "wgrad")
        seconds = _wgrad(rank, whole)

        def wgrad(instruction: Compute, width: Width) -> float:
            nonlocal remaining
            remaining -= 1
            if before is not None and not remaining:
                next(before, None)
            return seconds(instruction, width)

        columns = {"shard": outputs, "weight": inputs, "out": inputs, "other": inputs}
        rest(rank.run(name, program, columns, {"gemm": _gemm(rank), "wgrad": wgrad}))
        return
    waits = _gather_gemm(rank, name, rows, outputs, inputs)
    rank.compute(f"{name} wgrad", rank.machine.gemm(outputs, whole, inputs), waits)


def _fused(rank: Rank, name: str) -> bool:
    return rank.size > 1 and rank.sequence_parallel and isinstance(rank.way(name), Schedule)


# ------------------------------------------------------------------------ work of programs


def _gemm(rank: Rank, copied: float = 0) -> Work:
    """Seconds of ``gemm(out, a, b)``.

    Args:
        copied: bytes per element of ``b`` that must be copied first.
    """

    def seconds(instruction: Compute, width: Width) -> float:
        (out,), (a, b) = instruction.outs, instruction.ins
        inner, outer = width(a), width(b)
        copy = rank.machine.memory(2 * copied * inner * outer)
        return copy + rank.machine.gemm(out.rows, inner, outer)

    return seconds


def _wgrad(rank: Rank, whole: int) -> Work:
    """Seconds of ``wgrad(grad, x)``: ``grad^T @ x``, that of some of the rows added up in fp32."""

    def seconds(instruction: Compute, width: Width) -> float:
        grad, x = instruction.ins
        result = ITEM_BYTES if grad.rows == whole else 2 * SUM_BYTES
        return rank.machine.gemm(width(grad), grad.rows, width(x), result_bytes=result)

    return seconds


# ------------------------------------------------------------------------ without programs

_CORES = 20
"""Cube cores for MC2's tiling if the description does not give them."""
_ROUNDS = 4


def _form(rank: Rank, inner: int, *, kernel: bool = True) -> Kind:
    """The variant's kind, or ``megatron`` if the variant does not cover such a layer.

    Args:
        kernel: whether a fused kernel exists for the operation.
    """
    kind, one_node = rank.variant.kind, rank.links.members_per_node == rank.size
    tiled = kernel and rank.size in RANKS and one_node and INNER[0] <= inner < INNER[1]
    supported = {"kernel": kernel, "mc2": tiled}.get(kind, True)
    return kind if kind == "plain" or (supported and rank.sequence_parallel) else "megatron"


class _Mc2:
    """MC2's kernel: the tiles that its host chooses, and a layout conversion of the weight."""

    def __init__(
        self, rank: Rank, kind: Literal["gather", "scatter"], rows: int, inner: int, outer: int
    ) -> None:
        machine = rank.machine
        self.rank = rank
        self.ring = machine.inside.topology != "full_mesh"
        cut = tiling(kind, rows, inner, outer, rank.size, machine.cores or _CORES, ring=self.ring,
                     ordered=machine.ordered_sums > 0)  # fmt: skip
        self.rows = cut.rows
        # Factor on transfers, besides that of other work: MC2's own tiling formula's, or less.
        self.slowed = 1 + machine.mc2_grows * (cut.slowed - 1)
        self.layout = machine.memory(2 * ITEM_BYTES * inner * outer)

    def transfer(self, name: str, size: float, launches: int, *, sums: bool) -> tuple[int, ...]:
        """Transfer over a full mesh, or around a double ring.

        For a ring, the host's formula gives 74 to 95 us for any small transfer of 4 to 32 ranks,
        which fits a constant number of rounds.
        """
        rank, size = self.rank, size * self.slowed
        if not self.ring or rank.size == 2:
            return rank.collective(name, size, launches=launches, sums=sums)
        rounds, waits = min(rank.size - 1, _ROUNDS), tuple[int, ...]()
        for _ in range(rounds):
            part = size * (rank.size - 1) / rounds
            waits = rank.around(name, part, waits, launches)
            launches = 0
        return waits


def _slices(rank: Rank, operation: str, rows: int) -> list[int]:
    """Rows of a block in each slice; one slice with all rows if the variant does not slice."""
    slices = rank.way(operation)
    if not isinstance(slices, int) or rank.size == 1 or not rank.sequence_parallel:
        return [rows]
    return [stop - start for start, stop in pairwise(split(rows, slices))]


def _reorder(rank: Rank, name: str, rows: int, columns: int) -> None:
    """Add the copy that restores the order of rows: a slice holds rows of every block."""
    rank.compute(
        f"{name} reorder", rank.machine.memory(2 * rows * rank.size * columns * ITEM_BYTES)
    )


def _gathered(rank: Rank, name: str, numbers: int) -> tuple[int, ...]:
    """Gather ``numbers`` elements of every rank; returns the operations to wait for."""
    if not rank.sequence_parallel:
        return ()
    return rank.collective(name, numbers * ITEM_BYTES)


def _summed(rank: Rank, name: str, numbers: int) -> tuple[int, ...]:
    """Reduce-scatter ``numbers`` elements per rank, or all-reduce; returns what to wait for."""
    waits = rank.collective(f"{name} scatter", numbers * ITEM_BYTES, sums=True)
    if rank.sequence_parallel:
        return waits
    return rank.collective(f"{name} gather", numbers * ITEM_BYTES, launches=0)


def _gather_gemm(rank: Rank, name: str, rows: int, inner: int, outer: int) -> tuple[int, ...]:
    """Add the gather and the GEMM; returns what to wait for until all rows have arrived."""
    machine, n, form = rank.machine, rank.size, _form(rank, inner)
    whole, block = machine.gemm(rows * n, inner, outer), rows * inner * ITEM_BYTES
    if form == "kernel":
        rank.compute(name, machine.coc_kernel(whole, block, n))
        return ()
    if form == "mc2":
        # The own block first, then tiles of the other ranks as they arrive; one launch for all.
        kernel, arrivals = _Mc2(rank, "gather", rows, inner, outer), []
        for number, tile in enumerate(kernel.rows):
            size, first = tile * inner * ITEM_BYTES, not number
            arrivals.append(kernel.transfer(f"{name} gather", size, int(first), sums=False))
        rank.compute(f"{name} layout of the weight", kernel.layout, launches=0)
        rank.compute(f"{name} own", machine.gemm(rows, inner, outer), launches=0)
        for tile, waits in zip(kernel.rows, arrivals, strict=True):
            seconds = machine.gemm((n - 1) * tile, inner, outer, start=False)
            rank.compute(name, seconds, waits, launches=0)
        return arrivals[-1]
    slices = _slices(rank, name, rows)
    arrivals = [_gathered(rank, f"{name} gather", part * inner) for part in slices]
    for part, waits in zip(slices, arrivals, strict=True):
        rank.compute(name, machine.gemm(part * n, inner, outer), waits)
    if len(slices) > 1:
        _reorder(rank, name, rows, outer)
    return arrivals[-1]


def _gemm_scatter(
    rank: Rank,
    name: str,
    rows: int,
    inner: int,
    outer: int,
    *,
    kernel: bool,
    behind: Callable[[], None] | None = None,
) -> None:
    """Add the GEMM and the reduce-scatter; later operations wait for the sums.

    Args:
        kernel: whether a fused kernel exists for it.
        behind: work that does not need the sums.  It hides the end of the transfers, except in the
            ``plain`` variants, which wait first.
    """
    machine, n, form = rank.machine, rank.size, _form(rank, inner, kernel=kernel)
    whole, block = machine.gemm(rows * n, inner, outer), rows * outer * ITEM_BYTES
    waits: tuple[int, ...] = ()
    if form == "kernel":
        rank.compute(name, machine.coc_kernel(whole, block, n))
    elif form == "mc2":
        # One tile of all blocks at a time, each followed by its transfer.
        cut = _Mc2(rank, "scatter", rows, inner, outer)
        rank.compute(f"{name} layout of the weight", cut.layout)
        for number, tile in enumerate(cut.rows):
            seconds = machine.gemm(n * tile, inner, outer, start=not number)
            rank.compute(name, seconds, launches=0)
            waits = cut.transfer(f"{name} scatter", tile * outer * ITEM_BYTES, 0, sums=True)
    else:
        slices = _slices(rank, name, rows)
        if len(slices) > 1:
            _reorder(rank, name, rows, inner)
        for part in slices:
            rank.compute(name, machine.gemm(part * n, inner, outer))
            waits = _summed(rank, name, part * outer)
        if form == "plain":
            rank.need(waits)
            waits = ()
    if behind is not None:
        behind()
    rank.need(waits)
