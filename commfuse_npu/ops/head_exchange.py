"""Linear layers whose heads are exchanged for rows of the sequence, behind their GEMMs.

Ulysses context parallelism cuts activations by the sequence, but attention by heads: an all-to-all
leads from the one to the other, and another one back.  Here each is taken apart, and paired with
the projection that feeds it or that it feeds (CommFuse, arXiv 2604.24013: FuseA2A).

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``H`` hidden, ``O`` and
``F`` features of a rank's head group, ``x_sBH`` a tensor of that shape.  Without a batch dimension
everything holds for ``[s, H]``.

====================== ============================= ============================================
op                     forward                       backward
====================== ============================= ============================================
linear_all_to_all      GEMM -> rank of the heads     gradient arrives -> dgrad, wgrad
all_to_all_linear      heads arrive -> GEMM          dgrad -> rank of the rows; wgrad
====================== ============================= ============================================

What is between the two, the attention, is :mod:`commfuse_npu.ops.ulysses`.  The plain forms are in
:mod:`commfuse_npu.reference.heads`.

Weights are whole on every rank, so their gradients are those of this rank's rows, to be summed over
the ranks like that of any layer under context parallelism.

Of :class:`~commfuse_npu.ops.LinearOptions` the schedule, ``wgrad`` and ``main_grad`` count:
no partial sums of other ranks are added, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.head_linear import HeadRows, LinearOfHeads, LinearToHeads
from commfuse_npu.layers.linear_arguments import autocast, check_linear, check_sequence, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.ops.job import Job, any_grad, takes_plain_path
from commfuse_npu.plan.rules import exchange
from commfuse_npu.reference.heads import plain_all_to_all_linear, plain_linear_all_to_all
from commfuse_npu.runtime.transport import Transport

__all__ = ["all_to_all_linear", "check_projection", "linear_all_to_all"]


# ------------------------------------------------------------- rows to heads


def linear_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    rows: Sequence[Sequence[slice]] | None = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_to_all(linear(x, weight, bias))``: the projection to q, k and v of Ulysses.

    Equals, on rank r with ``W_d`` the rows of the weight for rank d::

        z_d_sBO = x_sBH @ W_d^T + b_d                  # for every rank d
        y_SBO = all_to_all(z_0, ..., z_N-1)            # rows b*s..(b+1)*s: rank b's, heads of r
        # backward
        dz_0, ..., dz_N-1 = all_to_all(dy_SBO)
        dx_sBH = sum of dz_d @ W_d                     # in fp32, rounded once
        dW_d = dz_d^T @ x_sBH

    Timelines, rank r of 3::

        forward   compute  | heads of r+1 | heads of r+2 | heads of r |
                  links    |              | -> r+1       | -> r+2     |

        backward  compute  | own dz: dx, dW_r | dz of r-1: += dx, dW | dz of r-2 ... |
                  links    | dz of r-1        | dz of r-2            |               |

    Args:
        x: ``[s, B, H]`` or ``[s, H]``, the same shape on every rank.  Need not be contiguous.
        weight: ``[N * O, H]``, whole and the same on every rank, the dtype of ``x``.
        bias: one number per row of the weight.
        transport: lanes of the context-parallel group.
        rows: per rank the slices of weight rows that make its features, in this order; together
            ``O`` for every rank, and the same on every rank.  With fewer key heads than ranks
            slices overlap, for 2 key heads and 4 ranks ``[[q_d, k_0, v_0], ...]`` for the first
            two ranks and ``[[q_d, k_1, v_1], ...]`` for the others; gradients of rows that several
            ranks use add up.  By default rank d gets the rows ``d * O .. (d + 1) * O``.
        options: ``wgrad="blocks"`` makes the gradient of the weight from each block as it arrives.

    Returns:
        ``[S, B, O]`` or ``[S, O]``.

    Raises:
        TypeError, ValueError: dtypes, devices, shapes or rows do not fit each other.
        MismatchError: another rank calls another op, or with another shape or other rows.
        TransportError: a transfer failed.
    """
    name = "linear_all_to_all"
    check_linear(name, x, weight, bias, transport, options)
    heads = HeadRows(name, weight.shape[0], transport.size, rows)
    x, weight, bias = autocast(x, weight, bias)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_linear_all_to_all(
            x, weight, bias, group=transport.group, rows=rows, options=options
        )
    transport.agree(f"{name} rows", rows=heads.bounds)
    job = Job.of(transport, options, name)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any_grad(x, weight, bias):
        y = _LinearAllToAll.apply(flat, weight, bias, job, heads)
    else:
        y = _project_out(flat.contiguous(), weight, bias, job, heads)
    return y.view(-1, *x.shape[1:-1], heads.features)


def _project_out(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: Job, heads: HeadRows
) -> torch.Tensor:
    rows, features = x.shape[0], heads.features
    linear = LinearToHeads(weight, heads, rows)
    y = x.new_empty((rows * job.transport.size, features))
    program = exchange(job.place(), rows, features, "made", False, True, False)
    running = job.transport.begin(program, job.name, y)
    running.run({"make": partial(linear.forward, x, bias)}, received=y)
    return y


class _LinearAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        job: Job,
        heads: HeadRows,
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.call = job, heads
        return _project_out(x, weight, bias, job, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job, heads = ctx.call
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        rows, features = grad.shape[0] // job.transport.size, heads.features
        linear = LinearToHeads(ctx.weight.get(job.name), heads, rows)
        linear.begin_backward(x, ctx.needs_input_grad[:3], job.options)
        tensors: dict[str, Any] = {"blocks": grad}
        if linear.needs_whole:
            tensors["received"] = torch.empty_like(grad)
        program = exchange(job.place(), rows, features, "given", True, linear.needs_whole, False)
        running = job.transport.begin(program, f"{job.name} backward", grad)
        running.run({"use": linear.backward}, **tensors)
        return *linear.gradients(tensors.get("received")), None, None


# ------------------------------------------------------------- heads to rows


def all_to_all_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``linear(all_to_all(x), weight, bias)``: the output projection of Ulysses.

    Equals, on rank r with ``V_g`` the columns of the weight for the heads of rank g::

        x_0_sBF, ..., x_N-1_sBF = all_to_all(x_SBF)    # this rank's rows, heads of every rank
        y_sBH = sum of x_g @ V_g^T + bias              # in fp32, rounded once
        # backward
        dx_SBF = all_to_all(dy_sBH @ V_0, ..., dy_sBH @ V_N-1)
        dV_g = dy_sBH^T @ x_g

    Timelines, rank r of 3::

        forward   compute  | y = own heads | += heads of r-1 | += heads of r-2 |
                  links    | heads of r-1  | heads of r-2    |                 |

        backward  compute  | dx for r+1 | dx for r+2 | own dx | dweight |
                  links    |            | -> r+1     | -> r+2 |         |

    For attention in front of it, :func:`~commfuse_npu.ops.ulysses.attention_all_to_all_linear` has
    both in one exchange.

    Args:
        x: ``[S, B, F]`` or ``[S, F]``, this rank's heads; S a multiple of N.
        weight: ``[H, N * F]``, whole and the same on every rank, the dtype of ``x``; the columns
            ``g * F .. (g + 1) * F`` take the heads of rank g.
        bias: ``[H]``.
        transport: lanes of the context-parallel group.
        options: ``wgrad="blocks"`` makes the gradient of the weight per head group, without a copy
            of the input.

    Returns:
        ``[s, B, H]`` or ``[s, H]``.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other, or S is not a
            multiple of the group size.
        MismatchError, TransportError: see :func:`linear_all_to_all`.
    """
    name = "all_to_all_linear"
    check_projection(name, x, weight, bias, transport, options)
    check_sequence(name, x.shape[0], transport.size)
    x, weight, bias = autocast(x, weight, bias)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_all_to_all_linear(x, weight, bias, group=transport.group, options=options)
    job = Job.of(transport, options, name)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any_grad(x, weight, bias):
        y = _AllToAllLinear.apply(flat, weight, bias, job)
    else:
        y = _project_in(flat.contiguous(), weight, bias, job)
    return y.view(-1, *x.shape[1:-1], weight.shape[0])


def _project_in(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    job: Job,
    received: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, features = x.shape[0] // job.transport.size, x.shape[1]
    linear = LinearOfHeads(weight, job.transport.size, rows)
    linear.begin_forward(bias)
    tensors: dict[str, Any] = {"blocks": x}
    if received is not None:
        tensors["received"] = received
    program = exchange(job.place(), rows, features, "given", True, received is not None, False)
    job.transport.begin(program, job.name, x).run({"use": linear.forward}, **tensors)
    return linear.output()


class _AllToAllLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: Job
    ) -> torch.Tensor:
        received = x.new_empty(x.shape) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(received)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        return _project_in(x.contiguous(), weight, bias, job, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        (received,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        weight = ctx.weight.get(job.name)
        rows, features = grad.shape[0], weight.shape[1] // job.transport.size
        linear = LinearOfHeads(weight, job.transport.size, rows)
        linear.begin_backward(grad, needs_weight, job.options)
        add_weight_gradient = partial(linear.add_weight_gradient, received)
        grad_x = None
        if needs_x:
            grad_x = grad.new_empty((rows * job.transport.size, features))
            program = exchange(job.place(), rows, features, "made", False, True, needs_weight)
            running = job.transport.begin(program, f"{job.name} backward", grad)
            running.run({"make": linear.backward, "wgrad": add_weight_gradient}, received=grad_x)
        else:
            add_weight_gradient()
        return grad_x, linear.weight_gradient(), grad.sum(0) if needs_bias else None, None


def check_projection(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transport: Transport,
    options: LinearOptions,
) -> None:
    """Refuse what cannot work before any rank waits for another.

    Raises:
        TypeError, ValueError: ``x`` ``[S, ..., F]`` and ``weight`` ``[H, N * F]`` do not fit.
    """
    size = transport.size
    if weight.dim() == 2 and weight.shape[1] != size * x.shape[-1]:
        raise ValueError(
            f"{name}: each of {size} ranks has {x.shape[-1]} features of its heads, the weight "
            f"takes {weight.shape[1]} in all; its shape {tuple(weight.shape)} has to be "
            f"[H, {size * x.shape[-1]}]"
        )
    part = weight[:, : x.shape[-1]] if weight.dim() == 2 else weight
    check_linear(name, x, part, bias, transport, options)
