"""Tensor-parallel linear layers without sequence parallelism: every rank has all rows.

Nothing is gathered; products are summed by an all-reduce, which is a reduce-scatter and an
all-gather in one launch.  The functions are those of :mod:`.linear`, whose ``rows`` are a rank's
share here, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.linear import wgrad_seconds
from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["column", "column_gradients", "row", "row_gradients"]


def column(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """GEMM."""
    rank.compute(name, rank.machine.gemm(rows * rank.size, inputs, outputs))


def row(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> None:
    """GEMM -> all-reduce of the product."""
    rank.compute(name, rank.machine.gemm(rows * rank.size, inputs, outputs))
    rank.need(_all_reduce(rank, name, rows * outputs))


def column_gradients(rank: Rank, name: str, rows: int, inputs: int, outputs: int) -> Iterator[None]:
    """dgrad -> all-reduce, behind it wgrad; begun when the iterator is asked."""
    yield
    whole = rows * rank.size
    rank.compute(name, rank.machine.gemm(whole, outputs, inputs))
    waits = _all_reduce(rank, name, rows * inputs)
    if rank.variant.kind == "plain":
        rank.need(waits)
    rank.compute(f"{name} wgrad", wgrad_seconds(rank, whole, inputs, outputs))
    rank.need(waits)


def row_gradients(
    rank: Rank,
    name: str,
    rows: int,
    inputs: int,
    outputs: int,
    *,
    before: Iterator[None] | None = None,
) -> None:
    """dgrad, then wgrad."""
    whole = rows * rank.size
    rank.compute(name, rank.machine.gemm(whole, outputs, inputs))
    rank.compute(f"{name} wgrad", wgrad_seconds(rank, whole, inputs, outputs))


def _all_reduce(rank: Rank, name: str, numbers: int) -> tuple[int, ...]:
    """Of so many numbers of every rank's share; returns what to wait for."""
    size = float(numbers * ITEM_BYTES)
    rank.collective(f"{name} scatter", size, sums=True)
    return rank.collective(f"{name} gather", size, launches=0)
