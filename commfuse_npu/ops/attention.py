"""Tensor-parallel attention that overlaps with the reduce-scatter after its output projection.

With tensor parallelism a rank holds some of the heads over the whole sequence.  The op splits the
queries into blocks by the rank that owns their rows afterwards.  While one block is sent, attention
and output projection of the next one run (CommFuse, arXiv 2604.24013: query split).

Legend: ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G`` key heads of
this rank, ``D`` features of a head, ``H`` hidden, ``N`` ranks, ``q_SBAD`` a tensor of that shape.

Under a causal mask without packed documents, the queries of later ranks see more keys, so blocks
have different costs.  The program then takes them in the order in which ranks wait least for the
links (:mod:`~commfuse_npu.plan.block_order`), and adds the partials in that order.

The projection to q, k and v before it is :func:`~commfuse_npu.ops.linear.all_gather_linear`.
"""

from __future__ import annotations

import torch

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.attention_runs import (
    AttentionRuns,
    Documents,
    checked_attention,
    options_for_attention,
)
from commfuse_npu.ops.call import AnyGroup, Call, Tensors, check_and_cast, transport_of
from commfuse_npu.ops.linear_options import LinearOptions
from commfuse_npu.plan.rules import GatherUse, ProduceScatter
from commfuse_npu.runtime.eager_only import eager_only

__all__ = ["attention_linear_reduce_scatter"]


@eager_only
def attention_linear_reduce_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    causal: bool,
    scale: float | None = None,
    documents: Documents | None = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``reduce_scatter(linear(attention(q, k, v), weight)) + bias``.

    Equals::

        o_SBAD = softmax(q_SBAD @ k_SBGD^T * scale) @ v_SBGD        # per head, masked if causal
        y_sBH = reduce_scatter(o_SBAD @ weight^T) + bias
        # backward
        do_SBAD = all_gather(dy_sBH) @ weight
        dq, dk, dv = attention_backward(do_SBAD)
        dweight = all_gather(dy_sBH)^T @ o_SBAD

    Timelines, rank r of 3; ``attend b`` is attention and projection of the queries of block b::

        forward   compute  | attend r+1 | attend r+2 | attend own r |
                  links    |            | -> r+1     | -> r+2       |

        backward  compute  | own r: do, dq, += dk, dv | r-1: ...  | r-2: ... | dweight |
                  links    | dy of r-1                | dy of r-2 |          |

    Args:
        q: ``[S, B, A, D]``, the heads of this rank over the whole sequence; S a multiple of N.
        k, v: ``[S, B, G, D]``; ``A`` is a multiple of ``G``.
        weight: ``[H, A * D]``, this rank's columns of the output projection.
        bias: ``[H]``, full and equal on every rank; added after the sum.
        causal: whether a query sees only the keys up to its own position.
        scale: of the scores; ``D ** -0.5`` by default.
        documents: packed in the sequence, with ``causal``; a query sees only keys of its own.
        options: as for :func:`~commfuse_npu.ops.linear.linear_reduce_scatter`.

    Returns:
        ``[s, B, H]``.
    """
    name = "attention_linear_reduce_scatter"
    transport = transport_of(name, group)
    documents = checked_attention(name, transport, options, q, k, v, causal, documents)
    heads, weight, bias = check_and_cast(name, q.flatten(2), weight, bias, transport, options)
    q = heads.view(q.shape)
    k = k.to(heads.dtype)
    v = v.to(heads.dtype)
    options = options_for_attention(options, causal and documents is None)
    call = _AttentionLinear(name, transport, options, q, rows=q.shape[0] * q.shape[1])
    call.attention = AttentionRuns(causal, documents, scale)
    y = call(q, k, v, weight)
    return y if bias is None else y + bias


class _AttentionLinear(Call):
    weight_at = 3
    attention: AttentionRuns

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        attention = self.attention
        attention.begin(q, k, v, keep=any(self.needs))
        rows = q.shape[0] // self.transport.size
        batch = q.shape[1]
        hidden = weight.shape[0]
        y = weight.new_empty((rows, batch, hidden))
        transposed = weight.t()

        def make(out: torch.Tensor, run: slice) -> None:
            gemm_into(out.view(-1, hidden), _flat(attention.forward(run)), transposed)

        sums = self.options.reduce_dtype
        running = self.begin(ProduceScatter(rows, batch * hidden), like=y, sum_dtype=sums)
        running.run(make=make, out=y.flatten(1))
        saved = attention.saved()
        # The weight's gradient alone needs only the output.
        return y, saved if any(self.needs[:3]) else saved[:1]

    def backward(self, grad: torch.Tensor) -> Tensors:
        attended, *inputs = saved = self.saved()
        rows, batch, hidden = grad.shape
        if inputs:
            self.attention.resume(saved)
        wgrad = self.weight_gradient()

        def use(piece: torch.Tensor, run: slice) -> None:
            if inputs:
                grad_out = torch.empty_like(attended[run])
                gemm_into(_flat(grad_out), piece.view(-1, hidden), self.weight)
                self.attention.backward(grad_out, run)

        def whole_wgrad(whole: torch.Tensor) -> None:
            wgrad.add(whole.view(-1, hidden), _flat(attended))

        grad = grad.view(rows, batch * hidden)
        rule = GatherUse(rows, batch * hidden, wgrad.needed)
        running = self.begin(rule, like=grad, backward=True)
        running.run(use=use, wgrad=whole_wgrad, shard=grad)
        grads = self.attention.gradients() if inputs else (None, None, None)
        return *grads, wgrad.result()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A view of ``[S, B, A, D]`` as ``[S * B, A * D]``, never a copy; callers may write to it."""
    return x.view(-1, x.shape[2] * x.shape[3])
