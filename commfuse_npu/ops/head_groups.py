"""Linear layers before and after the exchange of heads in Ulysses, in runs of rows.

With Ulysses a rank has all heads of some rows of the sequence before an exchange, and all rows of
some heads after it.  So a layer next to the exchange multiplies with one part of its weight for
each rank: the part of that rank's heads.  As in attention, it runs one GEMM per run of rows, in the
order of a program, so that a fused op and its unfused form add in the same order.

Legend: ``N`` ranks and head groups, ``n`` rows of a block (sequence times batch), ``H`` hidden,
``O``, ``F`` features of a head group.  A run of rows lies in one of the ``N`` blocks of a whole
``[N * n, ...]``; block g belongs to head group g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.call import Call, Tensors
from commfuse_npu.plan.rules import Blocks, ExchangeBlocks
from commfuse_npu.runtime.executor import Work

__all__ = ["HeadsToRows", "RowsToHeads"]


Parts = Sequence[torch.Tensor]
"""Of a weight, ``[F, H]`` for each head group."""


def _place(run: slice, block_rows: int) -> tuple[int, slice]:
    """The head group of a run of rows, and the rows inside its block."""
    group, start = divmod(run.start, block_rows)
    return group, slice(start, start + run.stop - run.start)


def _split(parts: Parts, x: torch.Tensor, out: torch.Tensor, run: slice) -> None:
    """Multiply rows of ``x`` ``[n, H]`` with their group's part into ``out`` ``[rows, F]``."""
    group, inside = _place(run, x.shape[0])
    gemm_into(out, x[inside], parts[group].t())


def _collect(parts: Parts, total: torch.Tensor, piece: torch.Tensor, run: slice) -> None:
    """Add the product of a group's features ``[rows, F]`` to rows of ``total`` ``[n, H]``."""
    group, inside = _place(run, total.shape[0])
    # total += a @ b, with the kernel of the weight gradient.
    accumulate = kernels_for(total.device).accumulate_weight_gradient
    accumulate(total[inside], piece.t(), parts[group])


def _concatenated(whole: torch.Tensor, size: int) -> torch.Tensor:
    """``[N * n, F]`` to ``[n, N * F]``: concatenate the blocks along the features."""
    return whole.view(size, whole.shape[0] // size, whole.shape[-1]).transpose(0, 1).flatten(1)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """An accumulator in fp32, or in fp64 for fp64 terms; the caller rounds it once at the end."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


class _HeadExchange(Call):
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

        Works and tensors are those of :class:`~commfuse_npu.plan.rules.ExchangeBlocks`.

        Args:
            blocks: ``[N * rows, columns]``: the input; with ``make``, the output of ``make``.
            received: ``[N * rows, columns]``, the result.
        """
        kind: Blocks = "given" if make is None else "made" if blocks is None else "made and kept"
        uses = use is not None
        keeps = received is not None
        rule = ExchangeBlocks(rows, columns, kind, uses, keeps, wgrad is not None)
        running = self.begin(rule, like=like, backward=backward)
        running.run(make=make, use=use, wgrad=wgrad, blocks=blocks, received=received)


class RowsToHeads(_HeadExchange):
    """``all_to_all(x @ W_g^T + b_g of every head group g)``, one GEMM per run of rows.

    ``x`` ``[n, H]``, ``weight`` ``[N * O, H]``, ``bias`` ``[N * O]``, to ``[N * n, O]``.
    """

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        x = x.contiguous()
        rows = x.shape[0]
        size = self.transport.size
        parts = weight.chunk(size)
        features = weight.shape[0] // size
        y = x.new_empty((rows * size, features))

        def make(out: torch.Tensor, run: slice) -> None:
            _split(parts, x, out, run)
            if bias is not None:
                out.add_(bias.view(size, features)[_place(run, rows)[0]])

        self.swap(rows, features, like=y, make=make, received=y)
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,) = self.saved()
        weight = self.weight
        size = self.transport.size
        total_rows, features = grad.shape
        needs_x, _, needs_bias = self.needs
        rows = total_rows // size
        parts = weight.chunk(size)
        grad_x = _zeros(weight, rows, weight.shape[1]) if needs_x else None
        grad_bias = _zeros(weight, size, features) if needs_bias else None
        wgrad = self.weight_gradient()
        received = torch.empty_like(grad) if wgrad.needed else None

        def use(piece: torch.Tensor, run: slice) -> None:
            if grad_x is not None:
                _collect(parts, grad_x, piece, run)
            if grad_bias is not None:
                grad_bias[_place(run, rows)[0]] += piece.sum(0, dtype=grad_bias.dtype)

        self.swap(rows, features, like=grad, use=use, blocks=grad, received=received, backward=True)
        if received is not None:
            wgrad.add(_concatenated(received, size), x)
        return (
            None if grad_x is None else grad_x.to(weight.dtype),
            wgrad.result(),
            None if grad_bias is None else grad_bias.flatten().to(weight.dtype),
        )


class HeadsToRows(_HeadExchange):
    """All-to-all from heads to rows, of the output of attention or of one tensor, and a projection
    if there is a weight.

    ``weight`` ``[H, N * F]`` and ``bias`` ``[H]``, or neither; q, k and v, or ``x`` ``[S, B, F]``
    without attention.  Returns ``[s * B, H]``, or ``[s, B, N * F]`` without a weight.
    """

    weight_at = 0
    attention: AttentionRuns | None = None
    shape: torch.Size
    """Of ``x`` or q; an empty batch has rows too."""

    def forward(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, *heads: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        x = heads[0]
        size = self.transport.size
        keep = any(self.needs[2:])
        self.shape = x.shape
        attention = self.attention
        make = None
        rows = x.shape[0] // size
        batch = x.shape[1]
        features = math.prod(x.shape[2:])
        blocks: torch.Tensor | None = None
        received: torch.Tensor | None = None
        use: Work
        if attention is None:
            blocks = x.contiguous().flatten(1)
        else:
            attention.begin(heads[0], heads[1], heads[2], keep)
            blocks = None if attention.attended is None else attention.attended.flatten(1)
            make = _maker(attention)
        if weight is None:
            y = x.new_empty((rows, batch, size * features))
            use = partial(_put_in_columns, y.unflatten(2, (size, features)))
        else:
            received = x.new_empty((x.shape[0], batch * features)) if self.needs[0] else None
            y = _zeros(weight, rows * batch, weight.shape[0])
            if bias is not None:
                y.add_(bias)
            use = self._by_rows(partial(_collect, weight.t().chunk(size), y))
        self.swap(
            rows, batch * features, like=x, make=make, use=use, blocks=blocks, received=received
        )
        saved = () if attention is None else attention.saved()
        return y.to(x.dtype), (received, *(saved if keep else ()))

    def backward(self, grad: torch.Tensor) -> Tensors:
        received, *saved = self.saved()
        size = self.transport.size
        weight = self.weight
        _, needs_bias, *needs_heads = self.needs
        total_rows, batch, features = *self.shape[:2], math.prod(self.shape[2:])
        columns = batch * features
        wgrad = self.weight_gradient()
        attention = self.attention if saved else None
        grad_x = None
        make = None
        blocks = None
        if weight is None:
            by_heads = grad.unflatten(2, (size, -1)).permute(2, 0, 1, 3)
            blocks = by_heads.flatten(2).flatten(0, 1).contiguous()
        else:
            make = self._by_rows(partial(_split, weight.t().chunk(size), grad))

        def add_wgrad() -> None:
            wgrad.add(grad, _concatenated(received.view(size * len(grad), features), size))

        if attention is not None:
            attention.resume(saved)
        elif any(needs_heads):
            grad_x = grad.new_empty((total_rows, columns))
        if any(needs_heads):
            # Mirrors the forward: the projection computes the blocks, attention uses them.
            use = None if attention is None else attention.backward
            self.swap(
                total_rows // size, columns, like=grad, make=make, use=use,
                wgrad=add_wgrad if wgrad.needed else None, blocks=blocks, received=grad_x,
                backward=True,
            )  # fmt: skip
        elif wgrad.needed:
            add_wgrad()
        grads: Tensors = (None if grad_x is None else grad_x.view(self.shape),) * len(needs_heads)
        if attention is not None:
            grads = attention.gradients()
        return wgrad.result(), grad.sum(0) if needs_bias else None, *grads

    def _by_rows(self, work: Work) -> Work:
        """A work for runs of the sequence, of a work for runs of rows."""
        batch = self.shape[1]

        def of_piece(piece: torch.Tensor, run: slice) -> None:
            flat = piece.view((run.stop - run.start) * batch, -1)
            work(flat, slice(run.start * batch, run.stop * batch))

        return of_piece


def _maker(attention: AttentionRuns) -> Work:
    def make(out: torch.Tensor, run: slice) -> None:
        attended = attention.forward(run)
        if attention.attended is None:  # else ``out`` is a view of it
            out.copy_(attended.flatten(1))

    return make


def _put_in_columns(y: torch.Tensor, piece: torch.Tensor, run: slice) -> None:
    """Copy a piece into ``y`` ``[s, B, N, F]``, while later blocks are in flight."""
    group, start = divmod(run.start, len(y))
    y[start : start + len(piece), :, group] = piece.view(-1, y.shape[1], y.shape[3])
