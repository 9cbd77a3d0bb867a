"""Attention of Ulysses context parallelism, its all-to-alls hidden behind the attention itself.

Under Ulysses a rank holds some rows of the sequence for all heads, but attends with some heads over
the whole sequence.  The whole chain, each arrow an all-to-all that is taken apart::

    x_sBH -> linear_all_to_all -> q_SBAD, k_SBGD, v_SBGD -> attention_all_to_all_linear -> y_sBH
              projection | heads                     attention per block | rows | projection

The projection to the heads, and back for those who have attention of their own, are in
:mod:`commfuse_npu.ops.head_exchange`; q, k and v are parts of what comes out of the first, after
whatever is done per head (rotary embedding, norms).  The plain forms of all are in
:mod:`commfuse_npu.reference.heads`.

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G``
key heads of this rank, ``D`` features of a head, ``F = A * D``, ``H`` hidden.

Under a causal mask the queries of later ranks see more keys.  Where attention feeds the transfers,
or is fed by them alone, the program takes its blocks in the order in which the ranks wait least for
the links (:mod:`~commfuse_npu.plan.block_order`).  The backward of
:func:`attention_all_to_all_linear` keeps the order of distance: there the dgrad comes first, which
costs the same for every block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.attention_options import check_self_attention, options_for_attention
from commfuse_npu.layers.attention_runs import AttentionRuns, run_of_gemm
from commfuse_npu.layers.head_linear import LinearOfHeads
from commfuse_npu.layers.linear_arguments import autocast, check_sequence
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.ops.head_exchange import check_projection
from commfuse_npu.ops.job import Job, any_grad, takes_plain_path
from commfuse_npu.plan.rules import exchange
from commfuse_npu.reference.heads import (
    plain_attention_all_to_all,
    plain_attention_all_to_all_linear,
)
from commfuse_npu.runtime.executor import Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["attention_all_to_all", "attention_all_to_all_linear"]


# ---------------------------------------------------------- attention to rows


def attention_all_to_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    transport: Transport,
    causal: bool,
    scale: float | None = None,
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
    check_sequence(name, q.shape[0], transport.size)
    if q.device.type != transport.device_type:
        raise ValueError(
            f"{name}: q is on {q.device}, the group transfers {transport.device_type} tensors; "
            "move it there"
        )
    if takes_plain_path(name, q, transport, rows=_rows(q)):
        return plain_attention_all_to_all(
            q, k, v, group=transport.group, causal=causal, scale=scale, options=options
        )
    job = Job.of(transport, options_for_attention(options, transport.size, causal), name)
    tensors = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.is_grad_enabled() and any_grad(q, k, v):
        y: torch.Tensor = _AttentionAllToAll.apply(*tensors, job, causal, scale)
        return y
    return _attend_beside(AttentionRuns(*tensors, causal, scale), q, job)


def _attend(
    attention: AttentionRuns,
    use: Work,
    q: torch.Tensor,
    job: Job,
    received: torch.Tensor | None = None,
) -> None:
    """Attend, block of queries by block, and ``use`` what comes back for the own rows.

    Args:
        received: ``[S, B * F]``, filled if given; block g gets the heads of rank g.
    """
    tensors: dict[str, Any] = {} if received is None else {"received": received}
    keeps = attention.attended is not None
    if attention.attended is not None:
        tensors["blocks"] = _by_sequence(attention.attended)

    def make(out: torch.Tensor, run: slice) -> None:
        attended = attention.forward(run)
        if not keeps:  # else it is where it was kept
            out.copy_(_by_sequence(attended))

    program = exchange(
        job.place(),
        q.shape[0] // job.transport.size,
        q[0].numel(),
        "made and kept" if keeps else "made",
        True,
        received is not None,
        False,
    )
    job.transport.begin(program, job.name, q).run({"make": make, "use": use}, **tensors)


def _attend_beside(attention: AttentionRuns, q: torch.Tensor, job: Job) -> torch.Tensor:
    size, batch, features = job.transport.size, q.shape[1], q.shape[2] * q.shape[3]
    block_rows = q.shape[0] // size
    y = q.new_empty((block_rows, batch, size, features))

    def use(piece: torch.Tensor, run: slice) -> None:
        # Early blocks find their place while later ones travel.
        group, start = divmod(run.start, block_rows)
        y[start : start + len(piece), :, group] = piece.view(-1, batch, features)

    _attend(attention, use, q, job)
    return y.flatten(2)


class _AttentionAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        job: Job,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        attention = AttentionRuns(q, k, v, causal, scale, keep=True)
        y = _attend_beside(attention, q, job)
        attention.save(ctx)
        ctx.job = job
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        attention = AttentionRuns.saved(ctx, ctx.saved_tensors)
        size = job.transport.size
        by_heads = grad.unflatten(2, (size, -1)).permute(2, 0, 1, 3)
        blocks = by_heads.reshape(size * grad.shape[0], -1).contiguous()
        program = exchange(job.place(), grad.shape[0], blocks.shape[1], "given", True, False, False)
        running = job.transport.begin(program, f"{job.name} backward", blocks)
        running.run({"use": _backward(attention)}, blocks=blocks)
        return *attention.gradients(), None, None, None


def _backward(attention: AttentionRuns) -> Work:
    return lambda piece, run: attention.backward(run, piece)


# ----------------------------------------------- attention to rows, projected


def attention_all_to_all_linear(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    causal: bool,
    scale: float | None = None,
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
        q, k, v, transport, causal, scale, dropout: as for :func:`attention_all_to_all`.
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
    check_sequence(name, q.shape[0], transport.size)
    check_projection(name, q.flatten(2), weight, bias, transport, options)
    q, weight, bias = autocast(q, weight, bias)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if takes_plain_path(name, q, transport, rows=_rows(q)):
        return plain_attention_all_to_all_linear(
            q, k, v, weight, bias, group=transport.group, causal=causal, scale=scale,
            options=options,
        )  # fmt: skip
    by_cost = options_for_attention(options, transport.size, causal)
    back = options_for_attention(options, transport.size, False).schedule
    job = Job(transport, by_cost, name, by_cost.schedule, back)
    tensors = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.is_grad_enabled() and any_grad(q, k, v, weight, bias):
        y: torch.Tensor = _AttentionAllToAllLinear.apply(*tensors, weight, bias, job, causal, scale)
        return y
    return _attend_linear(AttentionRuns(*tensors, causal, scale), q, weight, bias, job)


def _attend_linear(
    attention: AttentionRuns,
    q: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    job: Job,
    received: torch.Tensor | None = None,
) -> torch.Tensor:
    size, batch = job.transport.size, q.shape[1]
    block_rows = q.shape[0] // size
    linear = LinearOfHeads(weight, size, block_rows * batch)
    linear.begin_forward(bias)

    def use(piece: torch.Tensor, run: slice) -> None:
        linear.forward(_flat(piece, batch), run_of_gemm(run, batch))

    _attend(attention, use, q, job, received)
    return linear.output().view(block_rows, batch, weight.shape[0])


class _AttentionAllToAllLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        job: Job,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        received = None
        if ctx.needs_input_grad[3]:
            received = q.new_empty((q.shape[0], q[0].numel()))
        keep = any(ctx.needs_input_grad[:3])
        attention = AttentionRuns(q, k, v, causal, scale, keep=keep)
        y = _attend_linear(attention, q, weight, bias, job, received)
        if keep:
            attention.save(ctx, received)
        else:
            ctx.save_for_backward(received)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        received, *saved = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[3:5]
        block_rows, batch, hidden = grad.shape
        flat = grad.contiguous().view(-1, hidden)
        weight = ctx.weight.get(job.name)
        linear = LinearOfHeads(weight, job.transport.size, block_rows * batch)
        linear.begin_backward(flat, needs_weight, job.options)
        whole = None if received is None else _flat(received, batch)
        grads: tuple[torch.Tensor | None, ...] = None, None, None
        if saved:
            attention = AttentionRuns.saved(ctx, saved)
            _attention_backward(attention, linear, whole, grad, job)
            grads = attention.gradients()
        else:
            linear.add_weight_gradient(whole)
        grad_bias = flat.sum(0) if needs_bias else None
        return *grads, linear.weight_gradient(), grad_bias, None, None, None


def _attention_backward(
    attention: AttentionRuns,
    linear: LinearOfHeads,
    whole: torch.Tensor | None,
    grad: torch.Tensor,
    job: Job,
) -> None:
    """The mirror image of :func:`_attend_linear`: the projection feeds, attention uses."""
    assert attention.attended is not None
    rows, batch, columns = grad.shape[0], grad.shape[1], attention.attended[0].numel()

    def make(out: torch.Tensor, run: slice) -> None:
        linear.backward(_flat(out, batch), run_of_gemm(run, batch))

    wgrad = partial(linear.add_weight_gradient, whole)
    program = exchange(
        job.place(job.backward), rows, columns, "made", True, False, whole is not None
    )
    running = job.transport.begin(program, f"{job.name} backward", attention.attended)
    running.run({"make": make, "wgrad": wgrad, "use": _backward(attention)})


# -------------------------------------------------------------- what both share


def _rows(q: torch.Tensor) -> int:
    return q.shape[0] * q.shape[1]


def _by_sequence(attended: torch.Tensor) -> torch.Tensor:
    """``[S, B, A, D]`` as ``[S, B * A * D]``: never a copy, it may be written to."""
    return attended.view(attended.shape[0], -1)


def _flat(x: torch.Tensor, batch: int) -> torch.Tensor:
    """``[s, B * F]`` as ``[s * B, F]``: never a copy, it may be written to."""
    return x.view(-1, x.shape[1] // batch)
