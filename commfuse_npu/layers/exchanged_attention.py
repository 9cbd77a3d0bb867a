"""Attention of some heads over the whole sequence, and the exchange of its output, run by run.

A fused op and its plain form are the same lines here, as in
:mod:`commfuse_npu.layers.exchanged_linear`.  Legend: as in :mod:`commfuse_npu.ops.ulysses`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.attention_mask import AttentionMask
from commfuse_npu.layers.attention_runs import AttentionRuns, run_of_gemm
from commfuse_npu.layers.exchanged_linear import Exchange
from commfuse_npu.layers.head_linear import LinearOfHeads
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.runtime.executor import Work

__all__ = ["AttentionExchanged", "AttentionLinearExchanged"]


def _attend(
    ctx: Any,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask, float | None],
    use: Work,
    exchange: Exchange,
    **received: Any,
) -> None:
    """Attend, block of queries by block, and ``use`` what comes back for the own rows.

    Args:
        given: q, k, v, mask and scale; what their backward needs is saved.
        received: ``[S, B * F]``, filled and saved in front, if given; block g gets the heads of
            rank g.
    """
    q, k, v, mask, scale = given
    keep = any(ctx.needs_input_grad[:3])
    heads = q.contiguous(), k.contiguous(), v.contiguous()
    attention = AttentionRuns(*heads, mask, scale, keep=keep)
    tensors = {name: tensor for name, tensor in received.items() if tensor is not None}
    if attention.attended is not None:
        tensors["blocks"] = _by_sequence(attention.attended)

    def make(out: torch.Tensor, run: slice) -> None:
        attended = attention.forward(run)
        if not keep:  # else it is where it was kept
            out.copy_(_by_sequence(attended))

    works = {"make": make, "use": use}
    exchange.swap(q.shape[0] // exchange.size, q[0].numel(), q, works, **tensors)
    ctx.exchange = exchange
    if keep:
        attention.save(ctx, *received.values())
    else:
        ctx.save_for_backward(*received.values())


class AttentionExchanged(torch.autograd.Function):
    """``all_to_all(attention(q, k, v))``, one kernel per run of queries: ``[s, B, N * A * D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float | None,
        exchange: Exchange,
    ) -> torch.Tensor:
        batch, features = q.shape[1], q.shape[2] * q.shape[3]
        block_rows = q.shape[0] // exchange.size
        y = q.new_empty((block_rows, batch, exchange.size, features))

        def use(piece: torch.Tensor, run: slice) -> None:
            # Early blocks find their place while later ones travel.
            group, start = divmod(run.start, block_rows)
            y[start : start + len(piece), :, group] = piece.view(-1, batch, features)

        _attend(ctx, (q, k, v, mask, scale), use, exchange)
        return y.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        attention = AttentionRuns.saved(ctx, ctx.saved_tensors)
        by_heads = grad.unflatten(2, (exchange.size, -1)).permute(2, 0, 1, 3)
        blocks = by_heads.reshape(exchange.size * grad.shape[0], -1).contiguous()
        rows, columns = grad.shape[0], blocks.shape[1]
        works = {"use": _backward(attention)}
        exchange.swap(rows, columns, blocks, works, backward=True, blocks=blocks)
        return *attention.gradients(), None, None, None


def _backward(attention: AttentionRuns) -> Work:
    return lambda piece, run: attention.backward(run, piece)


class AttentionLinearExchanged(torch.autograd.Function):
    """``sum of o_g @ W_g^T + bias`` over ``o_g`` of ``all_to_all(attention(q, k, v))``.

    One kernel per run of queries, one GEMM per run of rows.  ``weight`` ``[H, N * A * D]``,
    ``bias`` ``[H]``, to ``[s, B, H]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        mask: AttentionMask,
        scale: float | None,
        exchange: Exchange,
    ) -> torch.Tensor:
        received = None
        if ctx.needs_input_grad[3]:
            received = q.new_empty((q.shape[0], q[0].numel()))
        batch, block_rows = q.shape[1], q.shape[0] // exchange.size
        linear = LinearOfHeads(weight, exchange.size, block_rows * batch)
        linear.begin_forward(bias)

        def use(piece: torch.Tensor, run: slice) -> None:
            linear.forward(_flat(piece, batch), run_of_gemm(run, batch))

        _attend(ctx, (q, k, v, mask, scale), use, exchange, received=received)
        ctx.weight = SavedWeight(weight)
        return linear.output().view(block_rows, batch, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        received, *saved = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        rows, batch, hidden = grad.shape
        flat = grad.contiguous().view(-1, hidden)
        linear = LinearOfHeads(ctx.weight.get(exchange.name), exchange.size, rows * batch)
        linear.begin_backward(flat, needs_weight, exchange.options)

        def make(out: torch.Tensor, run: slice) -> None:
            linear.backward(_flat(out, batch), run_of_gemm(run, batch))

        works: dict[str, Work] = {"make": make}
        if needs_weight:
            works["wgrad"] = partial(linear.add_weight_gradient, _flat(received, batch))
        grads: tuple[torch.Tensor | None, ...] = None, None, None
        if saved:
            # The mirror image of the forward: the projection feeds, attention uses.
            attention = AttentionRuns.saved(ctx, saved)
            works["use"] = _backward(attention)
            exchange.swap(rows, saved[0][0].numel(), flat, works, backward=True)
            grads = attention.gradients()
        elif needs_weight:
            works["wgrad"]()
        grad_bias = flat.sum(0) if needs_bias else None
        return *grads, linear.weight_gradient(), grad_bias, None, None, None


def _by_sequence(attended: torch.Tensor) -> torch.Tensor:
    """``[S, B, A, D]`` as ``[S, B * A * D]``: never a copy, it may be written to."""
    return attended.view(attended.shape[0], -1)


def _flat(x: torch.Tensor, batch: int) -> torch.Tensor:
    """``[s, B * F]`` as ``[s * B, F]``: never a copy, it may be written to."""
    return x.view(-1, x.shape[1] // batch)
