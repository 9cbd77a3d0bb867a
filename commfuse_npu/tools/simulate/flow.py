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

from collections.abc import Callable

from commfuse_npu.tools.simulate.linear import wgrad_seconds
from commfuse_npu.tools.simulate.llama import BACKWARD_ATTENTION, LayerShape, elementwise
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

    Attributes:
        here, everywhere: rows of a chunk, of this rank and of all.
        arriving, leaving: what to wait for, by chunk.
    """

    def __init__(self, rank: Rank, shape: LayerShape, chunks: int) -> None:
        if not divides(shape, chunks):
            raise ValueError(
                f"{shape.sequence // shape.ranks} tokens per rank cannot be cut into {chunks} "
                "equal chunks; choose a number of chunks that divides them"
            )
        self.rank, self.shape, self.chunks = rank, shape, chunks
        self.here, self.everywhere = shape.block // chunks, shape.rows // chunks
        self.arriving: dict[int, tuple[int, ...]] = {}
        self.leaving: dict[int, tuple[int, ...]] = {}

    def gather(self, name: str = "gather") -> tuple[int, ...]:
        """A chunk of hidden states, or of their gradients."""
        return self.rank.collective(name, self.here * self.shape.row_bytes)

    def scatter(self) -> tuple[int, ...]:
        """The sum of a chunk."""
        return self.rank.collective("scatter", self.here * self.shape.row_bytes, sums=True)

    def gemm(self, name: str, inner: int, outer: int) -> None:
        self.rank.compute(name, self.rank.machine.gemm(self.everywhere, inner, outer))

    def wgrad(self, name: str, inputs: int, outputs: int) -> None:
        """Of a chunk, added to a sum in fp32."""
        seconds = wgrad_seconds(self.rank, self.everywhere, inputs, outputs, self.shape.rows)
        self.rank.compute(name, seconds)

    def between(self, name: str, chunk: int, *widths: int, last: bool = False) -> None:
        """A chunk leaves a part and enters the next one, through work on this rank's rows.

        Args:
            last: there is no next one.
        """
        self.rank.need(self.leaving.pop(chunk, ()))
        elementwise(self.rank, name, self.here, *widths)
        if not last:
            self.arriving[chunk] = self.gather()

    def rows_of(self, chunk: int) -> slice:
        return slice(chunk * self.everywhere, (chunk + 1) * self.everywhere)


def forward(rank: Rank, shape: LayerShape, chunks: int, layers: int) -> None:
    """Add the forward of a stage of so many layers."""
    c, n, h = _Chunks(rank, shape, chunks), shape.ranks, shape.hidden
    f, qkv = shape.feed_forward // n, shape.qkv // n
    attend = shape.attention(rank.machine)

    def attention(chunk: int) -> None:
        c.gemm("qkv", h, qkv)
        elementwise(rank, "rotary", c.everywhere, qkv, qkv)
        rank.compute("attention", attend(c.rows_of(chunk)))
        c.gemm("proj", h // n, h)

    def mlp(chunk: int) -> None:
        c.gemm("fc1", h, 2 * f)
        elementwise(rank, "SwiGLU", c.everywhere, 2 * f, f)
        c.gemm("fc2", f, h)

    def pass_on(chunk: int, last: bool = False) -> None:
        c.between("residual, norm", chunk, *[h] * 4, last=last)

    for chunk in range(chunks):
        pass_on(chunk)
    parts = [attention, mlp] * layers
    for number, part in enumerate(parts, 1):
        for chunk in range(chunks):
            rank.need(c.arriving.pop(chunk))
            part(chunk)
            scattered = c.scatter()
            if chunk:
                pass_on(chunk - 1, last=number == len(parts))
            elif number > 1:
                pass_on(chunks - 1)
            c.leaving[chunk] = scattered
    pass_on(chunks - 1, last=True)


def backward(rank: Rank, shape: LayerShape, chunks: int, layers: int) -> None:
    """Add the backward of a stage of so many layers."""
    c, n, h = _Chunks(rank, shape, chunks), shape.ranks, shape.hidden
    f, qkv = shape.feed_forward // n, shape.qkv // n
    attend = shape.attention(rank.machine, BACKWARD_ATTENTION)

    def attention(chunk: int) -> None:
        c.gemm("proj dgrad", h, h // n)
        rank.compute("attention backward", attend(c.rows_of(chunk)))
        elementwise(rank, "rotary backward", c.everywhere, qkv, qkv)
        c.gemm("qkv dgrad", qkv, h)

    def mlp(chunk: int) -> None:
        c.gemm("fc2 dgrad", h, f)
        elementwise(rank, "SwiGLU backward", c.everywhere, f, 2 * f, 2 * f)
        c.gemm("fc1 dgrad", 2 * f, h)

    def pass_on(chunk: int, last: bool = False) -> None:
        c.between("norm backward", chunk, *[h] * 5, last=last)

    parts = [(mlp, ("fc2", f), ("fc1", 2 * f)), (attention, ("proj", h // n), ("qkv", qkv))]
    parts *= layers
    pass_on(chunks - 1)
    for number, (part, (row, inputs), (column, outputs)) in enumerate(parts, 1):
        for chunk in reversed(range(chunks)):
            if chunk or number < len(parts):
                pass_on((chunk - 1) % chunks)
            rank.need(c.arriving.pop(chunk))
            again = c.gather("gather again")
            part(chunk)
            scattered = c.scatter()
            c.wgrad(f"{row} wgrad", inputs, h)
            rank.need(again)
            c.wgrad(f"{column} wgrad", h, outputs)
            c.leaving[chunk] = scattered
    for chunk in reversed(range(chunks)):
        pass_on(chunk, last=True)
