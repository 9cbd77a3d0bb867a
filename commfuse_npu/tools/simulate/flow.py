"""Layers in chunks that flow through a whole stage, as launches of one rank.

The order is that of :mod:`commfuse_npu.ops.flow.stage`: a chunk leaves a part, and enters the next
one, when the chunk after it has been worked on.  The backward is its mirror image, and begins to
gather the input of a column-parallel layer again with dgrad of the row-parallel one after it; both
weight gradients of a chunk come when its sum is on its way::

    forward   work 0 | leave 2 | work 1 | leave 0 | work 2 | leave 1 | work 0 of the next part ...
    backward  ... | enter 1 | work 2 | enter 0 | work 1 | enter 2 | work 0 | ...

Transfers are collectives of the group, in order.  Legend: see :mod:`.llama`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commfuse_npu.tools.simulate.launches import Chunk
from commfuse_npu.tools.simulate.linear import wgrad_seconds
from commfuse_npu.tools.simulate.llama import (
    ADDED,
    BACKWARD_ATTENTION,
    NORM,
    ROTARY,
    LayerShape,
    elementwise,
)
from commfuse_npu.tools.simulate.machine import ITEM_BYTES, SUM_BYTES
from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["backward", "divides", "forward"]

Work = Callable[[int], None]


def divides(shape: LayerShape, chunks: int) -> bool:
    """Whether so many chunks divide a rank's part of the sequence, as they have to."""
    return shape.sequence % (shape.ranks * chunks) == 0


class _Chunks:
    """What all chunks of a rank have in common.

    Raises:
        ValueError: see :func:`divides`.

    Args:
        layers: their numbers, in the order in which they run.

    Attributes:
        here, everywhere: rows of a chunk, of this rank and of all.
        arriving, leaving: what to wait for, by chunk.
    """

    def __init__(self, rank: Rank, shape: LayerShape, chunks: int, layers: Sequence[int]) -> None:
        if not divides(shape, chunks):
            raise ValueError(
                f"{shape.sequence // shape.ranks} tokens per rank cannot be cut into {chunks} "
                "equal chunks; choose a number of chunks that divides them"
            )
        self.rank, self.shape, self.chunks, self.layers = rank, shape, chunks, layers
        self.here, self.everywhere = shape.block // chunks, shape.rows // chunks
        self.arriving: dict[int, tuple[int, ...]] = {}
        self.leaving: dict[int, tuple[int, ...]] = {}

    def at(self, part: int, chunk: int) -> None:
        """What follows is of this chunk in a part, of which a layer has two."""
        self.rank.launches.origin = Chunk(self.layers[part // 2], chunk)

    def gather(self, name: str) -> tuple[int, ...]:
        """A chunk of hidden states, or of their gradients."""
        return self.rank.collective(name, self.here * self.shape.row_bytes)

    def scatter(self, name: str) -> tuple[int, ...]:
        """The sum of a chunk."""
        return self.rank.collective(name, self.here * self.shape.row_bytes, sums=True)

    def gemm(self, name: str, inner: int, outer: int) -> None:
        self.rank.compute(name, self.rank.machine.gemm(self.everywhere, inner, outer))

    def wgrad(self, name: str, inputs: int, outputs: int) -> None:
        """Of a chunk, added to a sum in fp32."""
        seconds = wgrad_seconds(self.rank, self.everywhere, inputs, outputs, self.shape.rows)
        self.rank.compute(name, seconds)

    def between(
        self, name: str, chunk: int, part: int, gather: str, *widths: int, launches: int
    ) -> None:
        """A chunk leaves a part and enters the next one, through work on this rank's rows.

        Args:
            part: the number of that one.
            gather: its first transfer; empty if there is no such part.
        """
        self.at(max(0, part - 1), chunk)
        self.rank.need(self.leaving.pop(chunk, ()))
        elementwise(self.rank, name, self.here, *widths, launches=launches)
        if gather:
            self.at(part, chunk)
            self.arriving[chunk] = self.gather(gather)

    def rows_of(self, chunk: int) -> slice:
        return slice(chunk * self.everywhere, (chunk + 1) * self.everywhere)


def forward(rank: Rank, shape: LayerShape, chunks: int, layers: int) -> None:
    """Add the forward of a stage of so many layers."""
    c = _Chunks(rank, shape, chunks, range(1, layers + 1))
    n, h = shape.ranks, shape.hidden
    f, qkv = shape.feed_forward // n, shape.qkv // n
    keys = qkv - h // n
    attend = shape.attention(rank.machine)

    def attention(chunk: int) -> None:
        c.gemm("qkv", h, qkv)
        elementwise(rank, "rotary", c.everywhere, qkv, qkv, launches=ROTARY[0])
        # Keys and values of the chunk go to those of the chunks before.
        copied = rank.machine.memory(2 * c.everywhere * keys * ITEM_BYTES)
        rank.compute("attention", attend(c.rows_of(chunk)) + copied, launches=3)
        c.gemm("proj", h // n, h)

    def mlp(chunk: int) -> None:
        c.gemm("fc1", h, 2 * f)
        elementwise(rank, "SwiGLU", c.everywhere, 2 * f, f)
        c.gemm("fc2", f, h)

    parts = [(attention, "qkv", "proj"), (mlp, "fc1", "fc2")] * layers

    def pass_on(chunk: int, part: int) -> None:
        gather = f"{parts[part][1]} gather" if part < len(parts) else ""
        c.between("residual, norm", chunk, part, gather, *[h] * 4, launches=2)

    for chunk in range(chunks):
        pass_on(chunk, 0)
    for number, (part, _, row) in enumerate(parts):
        for chunk in range(chunks):
            c.at(number, chunk)
            rank.need(c.arriving.pop(chunk))
            part(chunk)
            scattered = c.scatter(f"{row} scatter")
            if chunk:
                pass_on(chunk - 1, number + 1)
            elif number:
                pass_on(chunks - 1, number)
            c.leaving[chunk] = scattered
    pass_on(chunks - 1, len(parts))


def backward(rank: Rank, shape: LayerShape, chunks: int, layers: int) -> None:
    """Add the backward of a stage of so many layers."""
    c = _Chunks(rank, shape, chunks, range(layers, 0, -1))
    n, h = shape.ranks, shape.hidden
    f, qkv = shape.feed_forward // n, shape.qkv // n
    keys = qkv - h // n
    attend = shape.attention(rank.machine, BACKWARD_ATTENTION)

    def attention(chunk: int) -> None:
        c.gemm("proj dgrad", h, h // n)
        # Gradients of all keys and values that it saw are added to sums in fp32, zeroed before the
        # first chunk; the chunk's own are rounded.
        run = c.rows_of(chunk)
        zeroed = SUM_BYTES * run.stop if chunk == chunks - 1 else 0
        added = (ITEM_BYTES + 2 * SUM_BYTES) * run.stop
        rounded = (SUM_BYTES + ITEM_BYTES) * c.everywhere
        traffic = rank.machine.memory((zeroed + added + rounded) * keys)
        rank.compute("attention backward", attend(run) + traffic, launches=5)
        elementwise(rank, "rotary backward", c.everywhere, qkv, qkv, launches=ROTARY[1])
        c.gemm("qkv dgrad", qkv, h)

    def mlp(chunk: int) -> None:
        c.gemm("fc2 dgrad", h, f)
        elementwise(rank, "SwiGLU backward", c.everywhere, f, 2 * f, 2 * f)
        c.gemm("fc1 dgrad", 2 * f, h)

    parts = [(mlp, ("fc2", f), ("fc1", 2 * f)), (attention, ("proj", h // n), ("qkv", qkv))]
    parts *= layers

    def pass_on(chunk: int, part: int) -> None:
        gather = f"{parts[part][1][0]} backward gather" if part < len(parts) else ""
        # Gradients of weights are added to those before once, with the last chunk.
        launches = NORM + (0 if chunk else ADDED)
        c.between("norm backward", chunk, part, gather, *[h] * 5, launches=launches)

    pass_on(chunks - 1, 0)
    for number, (part, (row, inputs), (column, outputs)) in enumerate(parts):
        for chunk in reversed(range(chunks)):
            if chunk:
                pass_on(chunk - 1, number)
            elif number + 1 < len(parts):
                pass_on(chunks - 1, number + 1)
            c.at(number, chunk)
            rank.need(c.arriving.pop(chunk))
            again = c.gather(f"{column} backward re-gather")
            part(chunk)
            scattered = c.scatter(f"{column} backward scatter")
            c.wgrad(f"{row} wgrad", inputs, h)
            rank.need(again)
            c.wgrad(f"{column} wgrad", h, outputs)
            c.leaving[chunk] = scattered
    for chunk in reversed(range(chunks)):
        pass_on(chunk, len(parts))
