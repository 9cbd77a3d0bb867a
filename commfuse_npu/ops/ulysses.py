"""Attention of Ulysses context parallelism, its all-to-alls hidden behind the attention itself.

Under Ulysses a rank holds some rows of the sequence for all heads, but attends with some heads over
the whole sequence.  The whole chain, each arrow an all-to-all that is taken apart::

    x_sBH -> linear_all_to_all -> q_SBAD, k_SBGD, v_SBGD -> attention_all_to_all_linear -> y_sBH
              projection | heads                     attention per block | rows | projection

The projection to the heads, and back for those who have attention of their own, are in
:mod:`commfuse_npu.ops.head_exchange`; q, k and v are parts of what comes out of the first, after
whatever is done per head (rotary embedding, norms).

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of this rank, ``D`` features of a head, ``F = A * D``, ``H`` hidden.

Under a causal mask, unless it is one of packed documents, the queries of later ranks see more keys.
Where attention feeds the transfers, or is fed by them alone, the program takes its blocks in the
order in which the ranks wait least for the links (:mod:`~commfuse_npu.plan.block_order`).  The
backward of :func:`attention_all_to_all_linear` keeps the order of distance: there the dgrad comes
first, which costs the same for every block.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.ops.attention_mask import AttentionMask, Documents
from commfuse_npu.ops.attention_runs import (
    AttentionRuns,
    check_self_attention,
    options_for_attention,
    run_of_gemm,
)
from commfuse_npu.ops.call import (
    AnyTransport,
    Call,
    autocast_dtype,
    check_and_cast,
    check_device,
    check_sequence,
)
from commfuse_npu.ops.head_exchange import swap
from commfuse_npu.ops.head_groups import LinearOfHeads
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.weight import SavedWeight
from commfuse_npu.runtime.executor import Work

__all__ = ["attention_all_to_all", "attention_all_to_all_linear"]


# ---------------------------------------------------------- attention to rows


def attention_all_to_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    transport: AnyTransport,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    hidden: torch.Tensor | None = None,
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_to_all(attention(q, k, v))``: attention per head, its output per row.

    Equals, on rank r::

        o_SBAD = softmax(q_SBAD @ k_SBGD^T * scale) @ v_SBGD        # per head, masked if causal
        o_0, ..., o_N-1 = all_to_all(o_SBAD)                        # rows of r, heads of every rank
        y_sBNAD = cat(o_0, ..., o_N-1)                              # side by side
        # backward
        do_SBAD = all_to_all(dy_sBNAD)
        dq, dk, dv = attention_backward(do_SBAD)                    # dk, dv added in fp32

    Timelines, rank r of 3; ``attend b`` is attention of the queries of block b::

        forward   compute  | attend r+1 | attend r+2 | attend own r | put side by side |
                  links    |            | -> r+1     | -> r+2       |                  |

        backward  compute  | own r: dq, += dk, dv | r-1: ...  | r-2: ... |
                  links    | do of r-1            | do of r-2 |          |

    Args:
        q: ``[S, B, A, D]``, the heads of this rank over the whole sequence; S a multiple of N.
        k, v: ``[S, B, G, D]``; ``A`` is a multiple of ``G``.
        transport: lanes of the context-parallel group.
        causal: a query sees the keys up to its own position; else all of them.
        scale: of the scores, ``D ** -0.5`` by default.
        documents: packed in the sequence, for a causal mask; a query sees keys of its own only.
        hidden: bool, ``[B, 1, S, S]`` or ``[1, 1, S, S]``, True where a query (third dimension)
            does not see a key (fourth), for any mask but documents.  Who sees nothing gets zeros.
        dropout: has to be 0.
        options: the schedule counts.

    Returns:
        ``[s, B, N * A * D]``: this rank's rows, the heads of rank 0 first.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other, S is not a multiple
            of the group size, or dropout is asked for.
        MismatchError: another rank calls another op, or with another shape.
        TransportError: a transfer failed.
    """
    name = "attention_all_to_all"
    check_self_attention(name, q, k, v, dropout)
    mask = AttentionMask(causal, documents, hidden).checked(name, q)
    check_sequence(name, q.shape[0], transport.size)
    check_device(name, "q", q, transport)
    dtype = autocast_dtype(transport.device_type) or q.dtype
    q, k, v = (head.to(dtype) for head in (q, k, v))
    options = options_for_attention(options, transport.size, mask.costs_rise)
    call = Call.of(name, transport, options, q, rows=q.shape[0] * q.shape[1])
    return call.apply(_AttentionExchanged, q, k, v, mask, scale)


# ----------------------------------------------- attention to rows, projected


def attention_all_to_all_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    hidden: torch.Tensor | None = None,
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``linear(all_to_all(attention(q, k, v)), weight, bias)``: attention and output projection.

    One exchange that attention feeds and that feeds the projection.  Equals, on rank r with ``V_g``
    the columns of the weight for the heads of rank g::

        o_SBAD = softmax(q_SBAD @ k_SBGD^T * scale) @ v_SBGD        # per head, masked if causal
        o_0, ..., o_N-1 = all_to_all(o_SBAD)                        # rows of r, heads of every rank
        y_sBH = sum of o_g @ V_g^T + bias                           # in fp32, rounded once
        # backward
        do_SBAD = all_to_all(dy_sBH @ V_0, ..., dy_sBH @ V_N-1)
        dq, dk, dv = attention_backward(do_SBAD)                    # dk, dv added in fp32
        dV_g = dy_sBH^T @ o_g

    Timelines, rank r of 3; ``attend b`` is attention of the queries of block b, ``V g`` the
    projection of the heads of rank g, ``do b`` the dgrad for the heads of rank b::

        forward   compute  | attend r+1 | attend r+2 | attend r | V r | V r-1 | V r-2 |
                  links    |            | -> r+1     | -> r+2   |     |       |       |

        backward  compute  | do r+1 | do r+2 | do r, dV | r: dq, += dk, dv | r-1: ... | r-2: ... |
                  links    |        | -> r+1 | -> r+2   |                  |          |          |

    Args:
        q, k, v, transport, causal, scale, documents, hidden, dropout: as for
            :func:`attention_all_to_all`.
        weight: ``[H, N * A * D]``, whole and the same on every rank.
        bias: ``[H]``.
        options: as for :func:`~commfuse_npu.ops.head_exchange.all_to_all_linear`.

    Returns:
        ``[s, B, H]``.

    Raises:
        TypeError, ValueError, MismatchError, TransportError: see :func:`attention_all_to_all`.
    """
    name = "attention_all_to_all_linear"
    check_self_attention(name, q, k, v, dropout)
    mask = AttentionMask(causal, documents, hidden).checked(name, q)
    check_sequence(name, q.shape[0], transport.size)
    size = transport.size
    heads, weight, bias = check_and_cast(
        name, q.flatten(2), weight, bias, transport, options, head_groups=size
    )
    q, k, v = heads.view(q.shape), k.to(heads.dtype), v.to(heads.dtype)
    by_cost = options_for_attention(options, size, mask.costs_rise)
    call = Call.of(name, transport, by_cost, q, rows=q.shape[0] * q.shape[1])
    call = call._replace(backward=options_for_attention(options, size, False).schedule)
    return call.apply(_AttentionLinearExchanged, q, k, v, weight, bias, mask, scale)


# --------------------------------------------------- attention, run by run


def _attend(
    ctx: Any,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask, float | None],
    use: Work,
    call: Call,
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
    kept = None if attention.attended is None else _by_sequence(attention.attended)

    def make(out: torch.Tensor, run: slice) -> None:
        attended = attention.forward(run)
        if not keep:  # else it is where it was kept
            out.copy_(_by_sequence(attended))

    rows, columns = q.shape[0] // call.transport.size, math.prod(q.shape[1:])
    swap(call, rows, columns, like=q, make=make, use=use, blocks=kept, **received)
    ctx.call = call
    if keep:
        attention.save(ctx, *received.values())
    else:
        ctx.save_for_backward(*received.values())


class _AttentionExchanged(torch.autograd.Function):
    """``all_to_all(attention(q, k, v))``, one kernel per run of queries: ``[s, B, N * A * D]``."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        scale: float | None,
        call: Call,
    ) -> torch.Tensor:
        batch, features = q.shape[1], q.shape[2] * q.shape[3]
        block_rows = q.shape[0] // call.transport.size
        y = q.new_empty((block_rows, batch, call.transport.size, features))

        def use(piece: torch.Tensor, run: slice) -> None:
            # Early blocks find their place while later ones travel.
            group, start = divmod(run.start, block_rows)
            y[start : start + len(piece), :, group] = piece.view(-1, batch, features)

        _attend(ctx, (q, k, v, mask, scale), use, call)
        return y.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        attention = AttentionRuns.saved(ctx, ctx.saved_tensors)
        by_heads = grad.unflatten(2, (call.transport.size, -1)).permute(2, 0, 1, 3)
        blocks = by_heads.flatten(2).flatten(0, 1).contiguous()
        rows, columns = grad.shape[0], blocks.shape[1]
        use = _backward(attention)
        swap(call, rows, columns, like=blocks, use=use, blocks=blocks, backward=True)
        return *attention.gradients(), None, None, None


def _backward(attention: AttentionRuns) -> Work:
    return lambda piece, run: attention.backward(run, piece)


class _AttentionLinearExchanged(torch.autograd.Function):
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
        call: Call,
    ) -> torch.Tensor:
        received = None
        if ctx.needs_input_grad[3]:
            received = q.new_empty((q.shape[0], math.prod(q.shape[1:])))
        batch, block_rows = q.shape[1], q.shape[0] // call.transport.size
        linear = LinearOfHeads(weight, call.transport.size, block_rows * batch)
        linear.begin_forward(bias)
        features = q.shape[2] * q.shape[3]

        def use(piece: torch.Tensor, run: slice) -> None:
            linear.forward(_flat(piece, features), run_of_gemm(run, batch))

        _attend(ctx, (q, k, v, mask, scale), use, call, received=received)
        ctx.weight = SavedWeight(weight)
        return linear.output().view(block_rows, batch, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        received, *saved = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        rows, batch, hidden = grad.shape
        flat = grad.contiguous().view(-1, hidden)
        linear = LinearOfHeads(ctx.weight.get(call.name), call.transport.size, rows * batch)
        linear.begin_backward(flat, needs_weight, call.options)
        features = linear.features

        def make(out: torch.Tensor, run: slice) -> None:
            linear.backward(_flat(out, features), run_of_gemm(run, batch))

        wgrad = None
        if needs_weight:
            wgrad = partial(linear.add_weight_gradient, _flat(received, features))
        grads: tuple[torch.Tensor | None, ...] = None, None, None
        if saved:
            # The mirror image of the forward: the projection feeds, attention uses.
            attention = AttentionRuns.saved(ctx, saved)
            columns, use = math.prod(saved[0].shape[1:]), _backward(attention)
            swap(call, rows, columns, like=flat, make=make, use=use, wgrad=wgrad, backward=True)
            grads = attention.gradients()
        elif wgrad is not None:
            wgrad()
        grad_bias = flat.sum(0) if needs_bias else None
        return *grads, linear.weight_gradient(), grad_bias, None, None, None


def _by_sequence(attended: torch.Tensor) -> torch.Tensor:
    """``[S, B, A, D]`` as ``[S, B * A * D]``: never a copy, it may be written to."""
    return attended.flatten(1)


def _flat(x: torch.Tensor, features: int) -> torch.Tensor:
    """``[s, B * F]`` as ``[s * B, F]``: never a copy, it may be written to."""
    return x.view(-1, features)
