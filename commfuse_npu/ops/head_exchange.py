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

What is between the two, the attention, is :mod:`commfuse_npu.ops.ulysses`.

Weights are whole on every rank, so their gradients are those of this rank's rows, to be summed over
the ranks like that of any layer under context parallelism.

Of :class:`~commfuse_npu.ops.LinearOptions` the schedule, ``wgrad`` and ``main_grad`` count:
no partial sums of other ranks are added, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.differentiable import differentiable
from commfuse_npu.layers.head_linear import HeadRows, LinearOfHeads, LinearToHeads
from commfuse_npu.layers.linear_arguments import check_and_cast, check_sequence, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.ops.job import AnyTransport, Job, transport_for
from commfuse_npu.plan.rules import Blocks, exchange
from commfuse_npu.runtime.executor import Work

__all__ = ["all_to_all_linear", "linear_all_to_all", "swap"]


# ------------------------------------------------------------- rows to heads


def linear_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
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
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    heads = HeadRows(name, weight.shape[0], transport.size, rows)
    transport = transport_for(name, x, transport, rows=rows_of(x))
    transport.agree(f"{name} rows", rows=heads.bounds)
    job = Job.of(transport, options, name)
    flat = x.reshape(-1, x.shape[-1])
    y = differentiable(_LinearToHeadsExchanged, flat, weight, bias, heads, job)
    # No -1 for the rows: an empty tensor has no say in them.
    return y.view(x.shape[0] * transport.size, *x.shape[1:-1], heads.features)


# ------------------------------------------------------------- heads to rows


def all_to_all_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
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
    size = transport.size
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options, head_groups=size)
    check_sequence(name, x.shape[0], size)
    transport = transport_for(name, x, transport, rows=rows_of(x))
    job = Job.of(transport, options, name)
    flat = x.reshape(-1, x.shape[-1])
    y = differentiable(_LinearOfHeadsExchanged, flat, weight, bias, job)
    return y.view(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])


class _LinearToHeadsExchanged(torch.autograd.Function):
    """``all_to_all(x @ W_g^T + b_g of every head group g)``, one GEMM per run of rows.

    ``x`` ``[n, H]``, ``weight`` ``[R, H]``, ``bias`` ``[R]``, to ``[N * n, O]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        heads: HeadRows,
        job: Job,
    ) -> torch.Tensor:
        x, rows, features = x.contiguous(), x.shape[0], heads.features
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.call = heads, job
        linear = LinearToHeads(weight, heads, rows)
        y = x.new_empty((rows * job.transport.size, features))
        swap(job, rows, features, y, {"make": partial(linear.forward, x, bias)}, received=y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads, job = ctx.call
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        rows = grad.shape[0] // job.transport.size
        linear = LinearToHeads(ctx.weight.get(job.name), heads, rows)
        linear.begin_backward(x, ctx.needs_input_grad[:3], job.options)
        tensors = {"blocks": grad}
        if linear.needs_whole:
            tensors["received"] = torch.empty_like(grad)
        works = {"use": linear.backward}
        swap(job, rows, heads.features, grad, works, backward=True, **tensors)
        return *linear.gradients(tensors.get("received")), None, None


class _LinearOfHeadsExchanged(torch.autograd.Function):
    """``sum of x_g @ W_g^T + bias`` over ``x_g`` of ``all_to_all(x)``, one GEMM per run of rows.

    ``x`` ``[N * n, F]``, ``weight`` ``[H, N * F]``, ``bias`` ``[H]``, to ``[n, H]``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        job: Job,
    ) -> torch.Tensor:
        rows = x.shape[0] // job.transport.size
        tensors: dict[str, Any] = {"blocks": x.contiguous()}
        if ctx.needs_input_grad[1]:
            tensors["received"] = x.new_empty(x.shape)
        ctx.save_for_backward(tensors.get("received"))
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        linear = LinearOfHeads(weight, job.transport.size, rows)
        linear.begin_forward(bias)
        swap(job, rows, x.shape[1], x, {"use": linear.forward}, **tensors)
        return linear.output()

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
        works: dict[str, Work] = {"make": linear.backward}
        if needs_weight:
            works["wgrad"] = partial(linear.add_weight_gradient, received)
        grad_x = None
        if needs_x:
            grad_x = grad.new_empty((rows * job.transport.size, features))
            swap(job, rows, features, grad, works, backward=True, received=grad_x)
        elif needs_weight:
            works["wgrad"]()
        return grad_x, linear.weight_gradient(), grad.sum(0) if needs_bias else None, None


# -------------------------------------------------------------- what Ulysses shares


def swap(
    job: Job,
    rows: int,
    columns: int,
    like: torch.Tensor,
    works: Mapping[str, Work],
    *,
    backward: bool = False,
    **tensors: Any,
) -> None:
    """An all-to-all of blocks ``[rows, columns]`` that are made, or used, piece by piece.

    Works and tensors are those of :func:`~commfuse_npu.plan.rules.exchange`: ``make`` unless
    ``blocks`` are given, ``use``, ``wgrad``; ``blocks`` and ``received``, ``[N * rows, columns]``.
    """
    blocks: Blocks = "given"
    if "make" in works:
        blocks = "made and kept" if "blocks" in tensors else "made"
    keep, wgrad = "received" in tensors, "wgrad" in works
    arguments = rows, columns, blocks, "use" in works, keep, wgrad
    job.begin(exchange, *arguments, like=like, backward=backward).run(works, **tensors)
