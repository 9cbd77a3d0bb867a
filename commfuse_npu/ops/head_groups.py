"""Linear layers before and after the exchange of heads in Ulysses, in runs of rows.

With Ulysses a rank has all heads of some rows of the sequence before an exchange, and all rows of
some heads after it.  So a layer next to the exchange multiplies with one part of its weight for
each rank: the part of that rank's heads.  As in attention, it runs one GEMM per run of rows, in the
order of a program, so that a fused op and its unfused form add in the same order.

Legend: ``N`` ranks and head groups, ``n`` rows of a block (sequence times batch), ``H`` hidden,
``O``, ``F`` features of a head group, ``R`` rows of a weight.  A run of rows lies in one of the
``N`` blocks of a whole ``[N * n, ...]``; block g belongs to head group g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.call import Call, Tensors
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan.rules import Blocks, exchange
from commfuse_npu.runtime.executor import Work

__all__ = ["HeadGroups", "HeadRows", "HeadsToRows", "RowsToHeads"]


class HeadRows:
    """Which rows of a weight ``[R, H]`` make the features of each head group.

    Args:
        name: the operation, for errors.
        weight_rows: ``R``.
        size: ``N``.
        rows: for each head group, the slices of rows that make its features, in order.  They may
            overlap: a key head that several ranks use is in several groups.  By default group g has
            the g-th of ``N`` equal parts.

    Attributes:
        bounds: ``rows`` as ``(start, stop)`` pairs.
        features: number of features of a group, ``O``.

    Raises:
        ValueError: the rows are not in the weight, or their number differs between groups.
    """

    def __init__(
        self, name: str, weight_rows: int, size: int, rows: Sequence[Sequence[slice]] | None = None
    ) -> None:
        if rows is None:
            if weight_rows % size:
                raise ValueError(
                    f"{name}: {weight_rows} rows of the weight are not divisible by the group size "
                    f"{size}; say with rows which of them each rank gets"
                )
            share = weight_rows // size
            rows = [[slice(group * share, (group + 1) * share)] for group in range(size)]
        if len(rows) != size:
            raise ValueError(
                f"{name}: rows are given for {len(rows)} ranks, the group has {size}; give one "
                "sequence of slices per rank"
            )
        self._weight_rows = weight_rows
        self.bounds = tuple(
            tuple(_bounds(name, part, weight_rows) for part in parts) for parts in rows
        )
        counts = [sum(stop - start for start, stop in parts) for parts in self.bounds]
        if len(set(counts)) != 1:
            raise ValueError(
                f"{name}: the ranks get {counts} rows of the weight; all have to get as many"
            )
        self.features = counts[0]

    def parts(self, group: int) -> list[tuple[slice, slice]]:
        """``(rows, columns)``: slices of the weight's rows, and their positions in the features."""
        parts, column = [], 0
        for start, stop in self.bounds[group]:
            parts.append((slice(start, stop), slice(column, column + stop - start)))
            column += stop - start
        return parts

    def take(self, weight: torch.Tensor, group: int) -> torch.Tensor:
        """The rows of a weight or a bias for a group; a view if they are one slice, else a copy."""
        parts = [weight[rows] for rows, _ in self.parts(group)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add_up(self, whole: torch.Tensor) -> torch.Tensor:
        """Combine the gradients of all groups ``[N * n, O]`` to those of the rows, ``[n, R]``.

        Rows in several groups get the sum, added in fp32.
        """
        size = len(self.bounds)
        blocks = whole.view(size, whole.shape[0] // size, self.features)
        if size * self.features == self._weight_rows and self._in_order():
            return _beside(whole, size)
        total = _zeros(whole, blocks.shape[1], self._weight_rows)
        for group, block in enumerate(blocks):
            for rows, columns in self.parts(group):
                total[:, rows].add_(block[:, columns])
        return total.to(whole.dtype)

    def _in_order(self) -> bool:
        flat = [bound for parts in self.bounds for bound in parts]
        starts = [0, *(stop for _, stop in flat)]
        return all(start == before for (start, _), before in zip(flat, starts, strict=False))


def _bounds(name: str, part: slice, weight_rows: int) -> tuple[int, int]:
    start = 0 if part.start is None else part.start
    stop = weight_rows if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start < stop <= weight_rows:
        raise ValueError(
            f"{name}: {part} is no run of the weight's {weight_rows} rows; give slices from 0 to "
            f"{weight_rows} with step 1"
        )
    return start, stop


def _beside(whole: torch.Tensor, size: int) -> torch.Tensor:
    """``[N * n, F]`` to ``[n, N * F]``: concatenate the blocks along the features."""
    return whole.view(size, whole.shape[0] // size, whole.shape[-1]).transpose(0, 1).flatten(1)


class HeadGroups:
    """Multiplies runs of rows with the part of a weight for their head group, ``[F, H]``.

    Args:
        weight: ``[R, H]``, cut by ``heads``; or without ``heads`` ``[H, N * F]``, whose columns
            ``g * F .. (g + 1) * F`` belong to group g.
        size: ``N``.
        block_rows: ``n``.

    Attributes:
        features: ``F``.
    """

    def __init__(
        self, weight: torch.Tensor, size: int, block_rows: int, heads: HeadRows | None = None
    ) -> None:
        self._weight, self._heads, self._block_rows = weight, heads, block_rows
        self.features = heads.features if heads is not None else weight.shape[1] // size
        self._kernels = kernels_for(weight.device)
        # A group has several chunks, so its copied part of the weight is cached; only for this
        # call, because the optimizer changes the weight.
        self._matrices: dict[int, torch.Tensor] = {}

    def _matrix(self, group: int) -> torch.Tensor:
        if self._heads is None:
            return self._weight.narrow(1, group * self.features, self.features).t()
        if group not in self._matrices:
            self._matrices[group] = self._heads.take(self._weight, group)
        return self._matrices[group]

    def place(self, run: slice) -> tuple[int, slice]:
        """The head group of a run of rows, and the rows inside its block."""
        group, start = divmod(run.start, self._block_rows)
        return group, slice(start, start + run.stop - run.start)

    def split(self, x: torch.Tensor, out: torch.Tensor, run: slice) -> int:
        """Multiply rows of ``x`` ``[n, H]`` into ``out`` ``[rows, F]``; return the group."""
        group, inside = self.place(run)
        gemm_into(out, x[inside], self._matrix(group).t())
        return group

    def collect(self, total: torch.Tensor, piece: torch.Tensor, run: slice) -> None:
        """Add the product of a group's features ``[rows, F]`` to rows of ``total`` ``[n, H]``."""
        group, inside = self.place(run)
        # total += a @ b, with the kernel of the weight gradient.
        self._kernels.accumulate_weight_gradient(total[inside], piece.t(), self._matrix(group))


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An accumulator in fp32, or in fp64 for fp64 terms; the caller rounds it once at the end."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


class _Exchange(Call):
    def swap(
        self,
        rows: int,
        columns: int,
        *,
        like: torch.Tensor,
        make: Work | None = None,
        use: Work | None = None,
        wgrad: Work | None = None,
        blocks: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
        backward: bool = False,
    ) -> None:
        """An all-to-all of blocks ``[rows, columns]``, computed or used piece by piece.

        Works and tensors are those of :func:`~commfuse_npu.plan.rules.exchange`.

        Args:
            blocks: ``[N * rows, columns]``: the input; with ``make``, the output of ``make``.
            received: ``[N * rows, columns]``, the result.
        """
        kind: Blocks = "given" if make is None else "made" if blocks is None else "made and kept"
        arguments = rows, columns, kind, use is not None, received is not None, wgrad is not None
        running = self.begin(exchange, *arguments, like=like, backward=backward)
        works = {"make": make, "use": use, "wgrad": wgrad}
        running.run(works, blocks=blocks, received=received)


class RowsToHeads(_Exchange):
    """``all_to_all(x @ W_g^T + b_g of every head group g)``, one GEMM per run of rows.

    ``x`` ``[n, H]``, ``weight`` ``[R, H]``, ``bias`` ``[R]``, to ``[N * n, O]``.
    """

    heads: HeadRows

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        x, rows, size, heads = x.contiguous(), x.shape[0], self.transport.size, self.heads
        groups = HeadGroups(weight, size, rows, heads)
        y = x.new_empty((rows * size, heads.features))

        def make(out: torch.Tensor, run: slice) -> None:
            group = groups.split(x, out, run)
            if bias is not None:
                out.add_(heads.take(bias, group))

        self.swap(rows, heads.features, like=y, make=make, received=y)
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,), weight, heads, size = self.saved(), self.weight, self.heads, self.transport.size
        rows, (needs_x, _, needs_bias) = grad.shape[0] // size, self.needs
        groups = HeadGroups(weight, size, rows, heads)
        grad_x = _zeros(weight, rows, weight.shape[1]) if needs_x else None
        grad_bias = _zeros(weight, weight.shape[0]) if needs_bias else None
        wgrad, blocks, whole = self.weight_gradient(), None, None
        if wgrad.needed and self.options.wgrad == "blocks":
            blocks = _zeros(weight, *weight.shape)
        elif wgrad.needed:
            whole = torch.empty_like(grad)
        accumulate = kernels_for(grad.device).accumulate_weight_gradient

        def use(piece: torch.Tensor, run: slice) -> None:
            if grad_x is not None:
                groups.collect(grad_x, piece, run)
            group, inside = groups.place(run)
            for part, columns in heads.parts(group):
                if blocks is not None:
                    accumulate(blocks[part], piece[:, columns], x[inside])
                if grad_bias is not None:
                    grad_bias[part] += piece[:, columns].sum(0, dtype=grad_bias.dtype)

        self.swap(
            rows, heads.features, like=grad, use=use, blocks=grad, received=whole, backward=True
        )
        if blocks is not None:
            wgrad.take(blocks)
        elif whole is not None:
            wgrad.add(heads.add_up(whole), x)
        return (
            None if grad_x is None else grad_x.to(weight.dtype),
            wgrad.result(),
            None if grad_bias is None else grad_bias.to(weight.dtype),
        )


class HeadsToRows(_Exchange):
    """All-to-all from heads to rows, after attention if there is a mask, and before a projection
    if there is a weight.

    ``weight`` ``[H, N * F]`` and ``bias`` ``[H]``, or neither; ``x`` ``[N * n, F]``, or q, k and v.
    Returns ``[n, H]``, or ``[s, B, N * F]`` without a weight; with attention ``n`` is ``s * B``.
    """

    weight_at = 0
    mask: AttentionMask | None = None
    scale: float | None = None
    rows, batch = 0, 1
    """Of the result; an empty batch has rows too."""
    state: tuple[Any, ...]

    def forward(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, *heads: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        x, size, keep = heads[0], self.transport.size, any(self.needs[2:])
        attention, make = None, None
        use: Work
        blocks: torch.Tensor | None
        received: torch.Tensor | None
        if self.mask is None:
            columns, blocks = x.shape[1], x.contiguous()
        else:
            q, k, v = heads
            self.batch, columns = q.shape[1], math.prod(q.shape[1:])
            attention = AttentionRuns(q, k, v, self.mask, self.scale, keep=keep)
            blocks = None if attention.attended is None else _by_sequence(attention.attended)
            make = _maker(attention)
        self.rows = rows = x.shape[0] // size
        whole = x.shape[0], columns
        if weight is None:
            received, y = None, x.new_empty((rows, self.batch, size, math.prod(x.shape[2:])))
            use = partial(_put_beside, y)
        else:
            received = x.new_empty(whole) if self.needs[0] else None
            y = _zeros(weight, rows * self.batch, weight.shape[0])
            if bias is not None:
                y.add_(bias)
            use = self._by_groups(HeadGroups(weight, size, len(y)).collect, y)
        self.swap(rows, columns, like=x, make=make, use=use, blocks=blocks, received=received)
        saved: Tensors = ()
        if attention is not None and keep:
            saved, self.state = attention.saved()
        y = y.flatten(2) if weight is None else y.to(x.dtype)
        return y, (received, *saved)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (received, *saved), size, weight = self.saved(), self.transport.size, self.weight
        _, needs_bias, *needs_heads = self.needs
        attention, grad_x, make, add_wgrad = None, None, None, None
        if weight is None:
            by_heads = grad.unflatten(2, (size, -1)).permute(2, 0, 1, 3)
            blocks = by_heads.flatten(2).flatten(0, 1).contiguous()
            columns = blocks.shape[1]
        else:
            groups = HeadGroups(weight, size, len(grad))
            columns, blocks = self.batch * groups.features, None
            make = self._by_groups(groups.split, grad)
        wgrad = self.weight_gradient()
        if wgrad.needed:
            add_wgrad = partial(self._add_weight_gradient, wgrad, grad, received)
        if saved:
            attention = AttentionRuns.again(saved, self.state)
        elif any(needs_heads):
            grad_x = grad.new_empty((size * self.rows, columns))
        if any(needs_heads):
            # Mirrors the forward: the projection computes the blocks, attention uses them.
            use = None if attention is None else attention.backward
            self.swap(
                self.rows, columns, like=grad, make=make, use=use, wgrad=add_wgrad, blocks=blocks,
                received=grad_x, backward=True,
            )  # fmt: skip
        elif add_wgrad is not None:
            add_wgrad()
        grads = (grad_x,) * len(needs_heads) if attention is None else attention.gradients()
        return wgrad.result(), grad.sum(0) if needs_bias else None, *grads

    def _by_groups(self, work: Work, rows: torch.Tensor) -> Work:
        """A work for runs of the sequence, of ``work(rows, piece, run)`` for runs of rows."""
        batch = self.batch

        def of_piece(piece: torch.Tensor, run: slice) -> None:
            flat = piece.view((run.stop - run.start) * batch, -1)
            work(rows, flat, slice(run.start * batch, run.stop * batch))

        return of_piece

    def _add_weight_gradient(
        self, wgrad: WeightGradient, grad: torch.Tensor, received: torch.Tensor
    ) -> None:
        """Compute the weight gradient from the input ``[N * n, F]``, saved by the forward.

        All rows are there, so blocks of rows hide nothing: ``blocks`` is a GEMM per head group
        without a copy, ``whole`` is one GEMM on a copy, as in the unfused op.
        """
        size, outputs = self.transport.size, self.weight.shape[0]
        features = self.weight.shape[1] // size
        whole = received.view(size * len(grad), features)
        if self.options.wgrad != "blocks":
            wgrad.add(grad, _beside(whole, size))
            return
        total = _zeros(self.weight, size, outputs, features)
        accumulate = kernels_for(grad.device).accumulate_weight_gradient
        for part, block in zip(total, whole.view(size, len(grad), features), strict=True):
            accumulate(part, grad, block)
        wgrad.take(_beside(total.flatten(0, 1), size))


def _maker(attention: AttentionRuns) -> Work:
    def make(out: torch.Tensor, run: slice) -> None:
        attended = attention.forward(run)
        if attention.attended is None:  # else ``out`` is a view of it
            out.copy_(_by_sequence(attended))

    return make


def _put_beside(y: torch.Tensor, piece: torch.Tensor, run: slice) -> None:
    """Copy a piece into ``y`` ``[s, B, N, F]``, while later blocks are in flight."""
    group, start = divmod(run.start, len(y))
    y[start : start + len(piece), :, group] = piece.view(-1, y.shape[1], y.shape[3])


def _by_sequence(attended: torch.Tensor) -> torch.Tensor:
    """A view of ``[S, B, A, D]`` as ``[S, B * A * D]``, never a copy; callers may write to it."""
    return attended.flatten(1)
