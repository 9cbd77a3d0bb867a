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

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.ops.call import AnyTransport, Call, check_and_cast, check_sequence, rows_of
from commfuse_npu.ops.head_groups import HeadRows, LinearOfHeads, LinearToHeads
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.weight import SavedWeight
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
    call = Call.of(name, transport, options, x, rows=rows_of(x))
    call.transport.agree(f"{name} rows", rows=heads.bounds)
    y = call.apply(_LinearToHeadsExchanged, x.reshape(-1, x.shape[-1]), weight, bias, heads)
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
    call = Call.of(name, transport, options, x, rows=rows_of(x))
    y = call.apply(_LinearOfHeadsExchanged, x.reshape(-1, x.shape[-1]), weight, bias)
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
        call: Call,
    ) -> torch.Tensor:
        x, rows, features = x.contiguous(), x.shape[0], heads.features
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.heads, ctx.call = heads, call
        linear = LinearToHeads(weight, heads, rows)
        y = x.new_empty((rows * call.transport.size, features))
        make = partial(linear.forward, x, bias)
        swap(call, rows, features, like=y, make=make, received=y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads, call = ctx.heads, ctx.call
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        rows = grad.shape[0] // call.transport.size
        linear = LinearToHeads(ctx.weight.get(call.name), heads, rows)
        linear.begin_backward(x, ctx.needs_input_grad[:3], call.options)
        whole = torch.empty_like(grad) if linear.needs_whole else None
        swap(
            call, rows, heads.features, like=grad, use=linear.backward, blocks=grad, received=whole,
            backward=True,
        )  # fmt: skip
        return *linear.gradients(whole), None, None


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
        call: Call,
    ) -> torch.Tensor:
        rows = x.shape[0] // call.transport.size
        x = x.contiguous()
        received = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(received)
        ctx.weight = SavedWeight(weight)
        ctx.call = call
        linear = LinearOfHeads(weight, call.transport.size, rows)
        linear.begin_forward(bias)
        swap(call, rows, x.shape[1], like=x, use=linear.forward, blocks=x, received=received)
        return linear.output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        (received,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        weight = ctx.weight.get(call.name)
        rows, features = grad.shape[0], weight.shape[1] // call.transport.size
        linear = LinearOfHeads(weight, call.transport.size, rows)
        linear.begin_backward(grad, needs_weight, call.options)
        wgrad = partial(linear.add_weight_gradient, received) if needs_weight else None
        grad_x = None
        if needs_x:
            grad_x = grad.new_empty((rows * call.transport.size, features))
            swap(
                call, rows, features, like=grad, make=linear.backward, wgrad=wgrad,
                received=grad_x, backward=True,
            )  # fmt: skip
        elif wgrad is not None:
            wgrad()
        return grad_x, linear.weight_gradient(), grad.sum(0) if needs_bias else None, None


# -------------------------------------------------------------- what Ulysses shares


def swap(
    call: Call,
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
    """An all-to-all of blocks ``[rows, columns]`` that are made, or used, piece by piece.

    Works and tensors are those of :func:`~commfuse_npu.plan.rules.exchange`.

    Args:
        blocks: ``[N * rows, columns]``: what is sent, or with ``make`` where it is kept.
        received: ``[N * rows, columns]``, to be filled.
    """
    kind: Blocks = "given" if make is None else "made" if blocks is None else "made and kept"
    arguments = rows, columns, kind, use is not None, received is not None, wgrad is not None
    works = {"make": make, "use": use, "wgrad": wgrad}
    tensors = {"blocks": blocks, "received": received}
    call.begin(exchange, *arguments, like=like, backward=backward).run(
        {name: work for name, work in works.items() if work is not None},
        ahead=False,
        **{name: tensor for name, tensor in tensors.items() if tensor is not None},
    )
