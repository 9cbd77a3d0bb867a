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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from commfuse_npu.layers.differentiable import differentiable
from commfuse_npu.layers.exchanged_linear import (
    Exchange,
    LinearOfHeadsExchanged,
    LinearToHeadsExchanged,
)
from commfuse_npu.layers.head_linear import HeadRows
from commfuse_npu.layers.linear_arguments import check_and_cast, check_sequence, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.ops.job import Job, takes_plain_path
from commfuse_npu.plan.rules import Blocks, exchange
from commfuse_npu.reference.heads import plain_all_to_all_linear, plain_linear_all_to_all
from commfuse_npu.runtime.executor import Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["all_to_all_linear", "fused_exchange", "linear_all_to_all"]


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
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    heads = HeadRows(name, weight.shape[0], transport.size, rows)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_linear_all_to_all(
            x, weight, bias, group=transport.group, rows=rows, options=options
        )
    transport.agree(f"{name} rows", rows=heads.bounds)
    fused = fused_exchange(Job.of(transport, options, name))
    flat = x.reshape(-1, x.shape[-1])
    y = differentiable(LinearToHeadsExchanged, flat, weight, bias, heads, fused)
    return y.view(-1, *x.shape[1:-1], heads.features)


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
    size = transport.size
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options, head_groups=size)
    check_sequence(name, x.shape[0], size)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_all_to_all_linear(x, weight, bias, group=transport.group, options=options)
    fused = fused_exchange(Job.of(transport, options, name))
    flat = x.reshape(-1, x.shape[-1])
    y = differentiable(LinearOfHeadsExchanged, flat, weight, bias, fused)
    return y.view(-1, *x.shape[1:-1], weight.shape[0])


# -------------------------------------------------------------- what Ulysses shares


def fused_exchange(job: Job) -> Exchange:
    """Blocks travel by a program of :func:`~commfuse_npu.plan.rules.exchange`."""
    return Exchange(job.name, job.transport.size, job.options, partial(_swap, job))


def _swap(
    job: Job,
    rows: int,
    columns: int,
    like: torch.Tensor,
    works: Mapping[str, Work],
    *,
    backward: bool = False,
    **tensors: Any,
) -> None:
    blocks: Blocks = "given"
    if "make" in works:
        blocks = "made and kept" if "blocks" in tensors else "made"
    name, schedule = job.name, job.forward
    if backward:
        name, schedule = f"{name} backward", job.backward
    keep, wgrad = "received" in tensors, "wgrad" in works
    program = exchange(job.place(schedule), rows, columns, blocks, "use" in works, keep, wgrad)
    job.transport.begin(program, name, like).run(works, **tensors)
