"""Ulysses context parallelism: all-to-alls that overlap with attention and projections.

Ulysses shards activations by the sequence, but attention by heads: one all-to-all converts from the
first to the second, and another one back.  Here each is split into transfers that overlap with the
work that computes or uses the blocks (CommFuse, arXiv 2604.24013: FuseA2A).  The whole chain::

    x_sBH -> linear_all_to_all -> q_SBAD, k_SBGD, v_SBGD -> attention_all_to_all -> y_sBH
              projection | heads              attention per block | rows | projection

q, k and v are parts of the result of the first op, after the work per head (rotary embedding,
norms).

Legend: ``N`` ranks, ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``H`` hidden, ``A`` query
heads and ``G`` key heads of this rank, ``D`` features of a head, ``O`` and ``F`` features of a
rank's head group (``F = A * D``), ``x_sBH`` a tensor of that shape.

====================== ================================ ========================================
op                     forward                          backward
====================== ================================ ========================================
linear_all_to_all      GEMM -> all-to-all               all-to-all -> dgrad; wgrad
all_to_all_linear      all-to-all -> GEMM               dgrad -> all-to-all; wgrad
attention_all_to_all   attention -> all-to-all          all-to-all -> attention
... with a weight      attention -> all-to-all -> GEMM  dgrad -> all-to-all -> attention; wgrad
====================== ================================ ========================================

Every rank has the full weights, so their gradients are those of this rank's rows; sum them over the
ranks, as for every layer with context parallelism.  The ops use ``schedule`` and ``main_grad`` of
:class:`~commfuse_npu.ops.LinearOptions`; the other options do not apply: no partials are added,
nothing is gathered, and all rows of a weight gradient are there when it begins.

Under a causal mask without packed documents, the queries of later ranks see more keys.  If
attention computes the blocks to send, or uses arriving blocks that no other work computes, the
program takes them in the order in which ranks wait least for the links
(:mod:`~commfuse_npu.plan.block_order`).  The backward of :func:`attention_all_to_all` with a weight
keeps the order of distance, because its dgrad comes first, and costs the same for every block.
"""

from __future__ import annotations

import torch

from commfuse_npu.ops.attention_runs import (
    AttentionRuns,
    Documents,
    checked_attention,
    options_for_attention,
)
from commfuse_npu.ops.call import AnyGroup, check_and_cast, check_sequence, transport_of
from commfuse_npu.ops.head_groups import HeadsToRows, RowsToHeads
from commfuse_npu.ops.linear_options import LinearOptions
from commfuse_npu.runtime.eager_only import eager_only

__all__ = [
    "all_to_all_linear",
    "attention_all_to_all",
    "linear_all_to_all",
]


# ------------------------------------------------------------- rows to heads


@eager_only
def linear_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_to_all(linear(x, weight, bias))``: the projection to q, k and v of Ulysses.

    Equals, on rank r with ``W_d`` the rows ``d * O .. (d + 1) * O`` of the weight::

        z_d_sBO = x_sBH @ W_d^T + b_d                  # for every rank d
        y_SBO = all_to_all(z_0, ..., z_N-1)            # rows b*s..(b+1)*s: rank b's, heads of r
        # backward
        dz_0, ..., dz_N-1 = all_to_all(dy_SBO)
        dx_sBH = sum of dz_d @ W_d                     # in fp32, rounded once
        dW_d = dz_d^T @ x_sBH

    Timelines, rank r of 3::

        forward   compute  | heads of r+1 | heads of r+2 | heads of r |
                  links    |              | -> r+1       | -> r+2     |

        backward  compute  | own dz: dx | dz of r-1: += dx | dz of r-2: += dx | dweight |
                  links    | dz of r-1  | dz of r-2        |                  |         |

    Args:
        x: ``[s, B, H]`` or ``[s, H]``, the same shape on every rank.  Need not be contiguous.
        weight: ``[N * O, H]``, full and equal on every rank, the dtype of ``x``.
        bias: ``[N * O]``.
        group: the context-parallel process group, as in :func:`.all_gather_linear`.
        options: see the module.

    Returns:
        ``[S, B, O]`` or ``[S, O]``.
    """
    name = "linear_all_to_all"
    transport = transport_of(name, group)
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    size = transport.size
    if weight.shape[0] % size:
        raise ValueError(
            f"{name}: {weight.shape[0]} rows of the weight are not divisible by the group size "
            f"{size}; repeat key heads until every rank has as many"
        )
    flat = x.flatten(0, -2)
    y = RowsToHeads(name, transport, options, x, rows=flat.shape[0])(flat, weight, bias)
    # Not view(-1, ...), which is ambiguous for an empty tensor.
    return y.view(x.shape[0] * size, *x.shape[1:-1], weight.shape[0] // size)


# ------------------------------------------------------------- heads to rows


@eager_only
def all_to_all_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
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

    After attention, :func:`attention_all_to_all` does both with one exchange.

    Args:
        x: ``[S, B, F]`` or ``[S, F]``, this rank's heads; S a multiple of N.
        weight: ``[H, N * F]``, full and equal on every rank, the dtype of ``x``; the columns
            ``g * F .. (g + 1) * F`` multiply the heads of rank g.
        bias: ``[H]``.
        group: the context-parallel process group, as in :func:`.all_gather_linear`.
        options: see the module.

    Returns:
        ``[s, B, H]`` or ``[s, H]``.
    """
    name = "all_to_all_linear"
    transport = transport_of(name, group)
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options, of_all_heads=True)
    size = transport.size
    check_sequence(name, x.shape[0], size)
    flat = x.flatten(0, -2).unsqueeze(1)
    y = HeadsToRows(name, transport, options, x, rows=flat.shape[0])(weight, bias, flat)
    return y.view(x.shape[0] // size, *x.shape[1:-1], weight.shape[0])


@eager_only
def attention_all_to_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_to_all(attention(q, k, v))``: attention per head, its output per row.

    With a weight ``linear(all_to_all(attention(q, k, v)), weight, bias)``: attention and output
    projection, with one exchange that overlaps with both.  Equals, on rank r with ``V_g`` the
    columns of the weight for the heads of rank g::

        o_SBAD = softmax(q_SBAD @ k_SBGD^T * scale) @ v_SBGD        # per head, masked if causal
        o_0, ..., o_N-1 = all_to_all(o_SBAD)                        # rows of r, heads of every rank
        y_sBNAD = cat(o_0, ..., o_N-1)                              # without a weight
        y_sBH = sum of o_g @ V_g^T + bias                           # with one, rounded once
        # backward
        do_SBAD = all_to_all(dy_sBNAD)                              # without a weight
        do_SBAD = all_to_all(dy_sBH @ V_0, ..., dy_sBH @ V_N-1)     # with one
        dq, dk, dv = attention_backward(do_SBAD)                    # dk, dv added in fp32
        dV_g = dy_sBH^T @ o_g

    Timelines, rank r of 3; ``attend b`` is attention of the queries of block b, ``do b`` the dgrad
    for the heads of rank b, ``V g`` the projection of the heads of rank g, or without a weight a
    copy into their columns::

        forward   compute  | attend r+1 | attend r+2 | attend r | V r | V r-1 | V r-2 |
                  links    |            | -> r+1     | -> r+2   |     |       |       |

        backward  compute  | do r+1 | do r+2 | do r, dV | r: dq, += dk, dv | r-1: ... | r-2: ... |
                  links    |        | -> r+1 | -> r+2   |                  |          |          |

        without   compute  | r: dq, += dk, dv | r-1: ...  | r-2: ... |
        a weight  links    | do of r-1        | do of r-2 |          |

    Args:
        q, k, v, causal, scale, documents: as for
            :func:`~commfuse_npu.ops.attention.attention_linear_reduce_scatter`.
        weight: ``[H, N * A * D]``, full and equal on every rank; ``None`` for no projection.
        bias: ``[H]``, with a weight.
        group: the context-parallel process group, as in :func:`.all_gather_linear`.
        options: see the module.

    Returns:
        ``[s, B, H]``; without a weight ``[s, B, N * A * D]``: this rank's rows, the heads of rank 0
        first.
    """
    name = "attention_all_to_all"
    transport = transport_of(name, group)
    if weight is not None:
        name += " with a weight"  # another operation, on which the ranks agree
    documents = checked_attention(name, transport, options, q, k, v, causal, documents)
    size = transport.size
    device = transport.device_type
    if weight is not None:
        heads, weight, bias = check_and_cast(
            name, q.flatten(2), weight, bias, transport, options, of_all_heads=True
        )
        q = heads.view(q.shape)
        k = k.to(heads.dtype)
        v = v.to(heads.dtype)
    elif bias is not None:
        raise ValueError(
            f"{name}: a bias of shape {tuple(bias.shape)} without a weight; pass the weight of the "
            "projection, or no bias"
        )
    elif torch.is_autocast_enabled(device):
        q, k, v = (head.to(torch.get_autocast_dtype(device)) for head in (q, k, v))
    by_cost = options_for_attention(options, causal and documents is None)
    call = HeadsToRows(name, transport, by_cost, q, rows=q.shape[0] * q.shape[1])
    if weight is not None:
        call.backward_schedule = options_for_attention(options, False).schedule
    call.attention = AttentionRuns(causal, documents, scale)
    y = call(weight, bias, q, k, v)
    return y if weight is None else y.view(q.shape[0] // size, q.shape[1], weight.shape[0])
