"""A Llama layer under tensor and sequence parallelism, as operations of one rank.

Legend: ``S`` sequence of a context-parallel rank, ``B`` micro-batch, ``H`` hidden, ``F``
feed-forward, ``n`` tensor-parallel ranks.  All widths below are those of one rank, ``1/n``::

    forward   norm | x arrives -> qkv | rotary | attention | proj -> sum | norm
                   | x arrives -> fc1 | SwiGLU | fc2 -> sum
    backward  the same from the end: gradients arrive -> dgrad, wgrad of fc2 and proj; dgrad -> sum,
              x arrives again -> wgrad of fc1 and qkv

FLOP of attention (causal, forward): ``2 * B * S^2 * H`` for all ranks, two products over half of
the scores; the backward takes 2.5 times that (five products instead of two, as flash attention
recomputes the scores).  Element-wise work costs its memory traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate.rank import Gather, Rank, Scatter, Work, gemm

__all__ = ["BACKWARD_ATTENTION", "SUM_BYTES", "Attended", "LayerShape", "backward", "forward",
           "head_backward", "head_forward", "mlp_in", "mlp_out", "output_projection"]  # fmt: skip

BACKWARD_ATTENTION = 2.5
"""FLOP of attention's backward in those of its forward."""
SUM_BYTES = 4
"""Weight gradients by blocks are summed in fp32."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer for one tensor-parallel group.

    Attributes:
        sequence: tokens of a sequence on one context-parallel rank.
        attended: tokens of the whole sequence, over all context-parallel ranks.
        batch: sequences of a micro-batch.
        hidden, feed_forward, qkv, vocabulary: whole widths, over all tensor-parallel ranks.
        ranks: of the tensor-parallel group; it divides all of them.
    """

    sequence: int
    attended: int
    batch: int
    hidden: int
    feed_forward: int
    qkv: int
    vocabulary: int
    ranks: int

    @property
    def rows(self) -> int:
        """Rows of the whole activation."""
        return self.sequence * self.batch

    @property
    def block(self) -> int:
        """Rows of one rank's block under sequence parallelism."""
        return self.rows // self.ranks

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the hidden activation, which is all that is ever sent."""
        return self.hidden * ITEM_BYTES

    @property
    def attention_flops(self) -> float:
        """Of one rank, forward."""
        parts = self.ranks * (self.attended // self.sequence)
        return 2.0 * self.batch * self.attended**2 * self.hidden / parts

    def attention(self, machine: Machine, factor: float = 1.0) -> Work:
        """Seconds of attention of a run of query rows, times ``factor``.

        Causal: later rows see more keys.  With context parallelism each rank has a part from both
        ends of the sequence, so that there all rows cost the same.
        """
        uniform = self.attended != self.sequence
        whole = machine.attention(self.attention_flops * factor)

        def seconds(run: slice) -> float:
            start, stop = run.start / self.rows, run.stop / self.rows
            share = stop - start if uniform else stop**2 - start**2
            queries = (run.stop - run.start) / self.batch
            return whole * share * (1 + machine.gemm_half_rows / queries)

        return seconds


def _wgrad(rank: Rank, shape: LayerShape, inputs: float, outputs: float) -> Work:
    """``dw = dy^T @ x`` for a run of rows, which are summed over; dw's own rows are the outputs.

    Of some rows only it is added to a sum in fp32, which is read and written.
    """

    def seconds(run: slice) -> float:
        rows = run.stop - run.start
        result_bytes = ITEM_BYTES if rows == shape.rows else 2 * SUM_BYTES
        return rank.machine.gemm(outputs, rows, inputs, result_bytes=result_bytes)

    return seconds


def _elementwise(rank: Rank, name: str, rows: float, *widths: float) -> None:
    """Work that reads and writes so many numbers per row."""
    rank.compute(name, rank.machine.memory(rows * sum(widths) * ITEM_BYTES))


def _causal(rank: Rank) -> Schedule | None:
    """The variant's schedule, in the order for blocks of queries that cost differently."""
    schedule = rank.variant.schedule
    return schedule and schedule.for_causal_blocks(rank.size)


def output_projection(rank: Rank, shape: LayerShape) -> None:
    """Add ``proj`` and its scatter, forward."""
    _row_parallel(rank, shape, "proj", shape.hidden / shape.ranks)


def mlp_in(rank: Rank, shape: LayerShape) -> None:
    """Add the gather and ``fc1``, forward."""
    width = 2 * shape.feed_forward / shape.ranks
    rank.gather_then_work(
        "fc1", shape.block, shape.row_bytes, gemm(rank.machine, shape.hidden, width),
        copied_row_bytes=width * ITEM_BYTES, inner=shape.hidden,
    )  # fmt: skip


def mlp_out(rank: Rank, shape: LayerShape) -> None:
    """Add ``fc2`` and its scatter, forward."""
    _row_parallel(rank, shape, "fc2", shape.feed_forward / shape.ranks)


def _row_parallel(rank: Rank, shape: LayerShape, name: str, inner: float) -> None:
    rank.work_then_scatter(
        name, shape.block, shape.row_bytes, gemm(rank.machine, inner, shape.hidden),
        copied_row_bytes=inner * ITEM_BYTES, inner=int(inner),
    )  # fmt: skip


class Attended(NamedTuple):
    """Attention under context parallelism, which is played by itself.

    Attributes:
        seconds: with what its transfers leave exposed.
        waiting: for how many of them the compute engine stands still.
        projects: whether the projections before and after it are in it.
    """

    seconds: float
    waiting: float = 0.0
    projects: bool = False


def forward(rank: Rank, shape: LayerShape, attention: Attended | None = None) -> None:
    """Add a layer's forward.

    Args:
        attention: by default that of the shape.
    """
    machine, n, block, row = rank.machine, shape.ranks, shape.block, shape.row_bytes
    h, f, qkv = shape.hidden, shape.feed_forward / n, shape.qkv / n
    _elementwise(rank, "norm", block, h, h)
    outside = attention is None or not attention.projects
    if outside:
        rank.gather_then_work(
            "qkv", block, row, gemm(machine, h, qkv), copied_row_bytes=qkv * ITEM_BYTES, inner=h
        )
    _elementwise(rank, "rotary", shape.rows, qkv, qkv)
    attend, proj = shape.attention(machine), gemm(machine, h / n, h)
    if rank.variant.attention and attention is None and n > 1:
        scatter = Scatter(rank, "attention and proj", block, row, schedule=_causal(rank))
        scatter.produce(lambda run: attend(run) + proj(run))
        scatter.finish()
    else:
        whole = attend(slice(0, shape.rows)) if attention is None else attention.seconds
        rank.compute("attention", whole)
        if outside:
            output_projection(rank, shape)
    _elementwise(rank, "residual, norm", block, h, h, h, h)
    mlp_in(rank, shape)
    _elementwise(rank, "SwiGLU", shape.rows, 2 * f, f)
    mlp_out(rank, shape)
    _elementwise(rank, "residual", block, h, h, h)


def backward(rank: Rank, shape: LayerShape, attention: Attended | None = None) -> None:
    """Add a layer's backward; see :func:`forward`."""
    machine, n, block, row = rank.machine, shape.ranks, shape.block, shape.row_bytes
    h, f, qkv = shape.hidden, shape.feed_forward / n, shape.qkv / n

    def wgrad(inputs: float, outputs: float) -> Work:
        return _wgrad(rank, shape, inputs, outputs)

    rank.row_backward(
        "fc2", block, row, gemm(machine, h, f), wgrad(f, h), copied_row_bytes=f * ITEM_BYTES,
        inner=h,
    )  # fmt: skip
    _elementwise(rank, "SwiGLU backward", shape.rows, f, 2 * f, 2 * f)
    rank.column_backward(
        "fc1", block, row, gemm(machine, 2 * f, h), wgrad(h, 2 * f),
        copied_row_bytes=2 * f * ITEM_BYTES,
    )  # fmt: skip
    _elementwise(rank, "norm backward", block, h, h, h, h)
    attend = shape.attention(machine, BACKWARD_ATTENTION)
    proj, proj_wgrad = gemm(machine, h, h / n), wgrad(h / n, h)
    whole = rank.variant.wgrad == "whole"
    outside = attention is None or not attention.projects
    if rank.variant.attention and attention is None and n > 1:
        gather = Gather(
            rank, "proj and attention", block, row, in_place=whole, schedule=_causal(rank)
        )
        gather.consume(lambda run: proj(run) + attend(run) + (0.0 if whole else proj_wgrad(run)))
        waits = gather.finish()
        if whole:
            rank.compute("proj wgrad", proj_wgrad(slice(0, shape.rows)), waits)
    else:
        if outside:
            rank.row_backward(
                "proj", block, row, proj, proj_wgrad, copied_row_bytes=h / n * ITEM_BYTES, inner=h
            )
        seconds = attend(slice(0, shape.rows)) if attention is None else attention.seconds
        rank.compute("attention backward", seconds)
    _elementwise(rank, "rotary backward", shape.rows, qkv, qkv)
    if outside:
        rank.column_backward(
            "qkv", block, row, gemm(machine, qkv, h), wgrad(h, qkv),
            copied_row_bytes=qkv * ITEM_BYTES,
        )  # fmt: skip
    _elementwise(rank, "norm backward", block, h, h, h, h)


def head_forward(rank: Rank, shape: LayerShape) -> None:
    """Add the final norm, the output layer and the loss (logits in fp32, three passes)."""
    machine, block, v = rank.machine, shape.block, shape.vocabulary / shape.ranks
    _elementwise(rank, "norm", block, shape.hidden, shape.hidden)
    rank.gather_then_work(
        "output", block, shape.row_bytes, gemm(machine, shape.hidden, v),
        copied_row_bytes=v * ITEM_BYTES, inner=shape.hidden,
    )  # fmt: skip
    _elementwise(rank, "loss", shape.rows, *[2 * v] * 3)


def head_backward(rank: Rank, shape: LayerShape) -> None:
    """Add their backward."""
    machine, block, v = rank.machine, shape.block, shape.vocabulary / shape.ranks
    _elementwise(rank, "loss backward", shape.rows, 2 * v, v)
    rank.column_backward(
        "output", block, shape.row_bytes, gemm(machine, v, shape.hidden),
        _wgrad(rank, shape, shape.hidden, v), copied_row_bytes=v * ITEM_BYTES,
    )  # fmt: skip
    _elementwise(rank, "norm backward", block, *[shape.hidden] * 4)
