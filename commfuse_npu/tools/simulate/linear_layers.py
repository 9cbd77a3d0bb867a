"""Tensor-parallel linear layers as launches of one rank, in every variant.

The fused variants run the programs of :mod:`commfuse_npu.ops.linear`; the others are implemented
here.  Without sequence parallelism every rank has all rows: nothing is gathered, and products are
summed by an all-reduce, modeled as a reduce-scatter and an all-gather in one launch.

Legend: a *block* is the part of one rank: ``rows`` rows of ``n * rows``; ``inputs`` and ``outputs``
are the features of this rank's weight ``[outputs, inputs]``.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from commfuse_npu.plan import Schedule, split
from commfuse_npu.plan.rules import ColumnBackward, GatherGemm, GemmScatter
from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate import mc2
from commfuse_npu.tools.simulate.group import simulate
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import MC2


def column(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """Gather blocks -> GEMM."""
    if not _fused(rank, name):
        _gather_gemm(rank, name, rows, inputs, outputs)
        return
    columns = {"shard": inputs, "weight": outputs, "out": outputs}
    rest(rank.run(name, GatherGemm(rows, inputs, outputs), columns))


def row(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """GEMM -> reduce-scatter of the product; later operations wait for the sums."""
    if _in_kernel(rank, name, mc2.gemm_scatter, rows, inputs, outputs):
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
        if not _in_kernel(rank, name, mc2.gather_gemm, rows, outputs, inputs):
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
    runs = lora and lora.fused and lora.adapts(name) and mc2.supports(rank, sizes[1])
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
    if kind == "mc2" and mc2.supports(rank, inner):
        return mc2.gather_gemm(rank, name, rows, inner, outer)
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
    if kind == "mc2" and not behind and mc2.supports(rank, inner):
        mc2.gemm_scatter(rank, name, rows, inner, outer)
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
