"""Tensor-parallel attention whose reduce-scatter is hidden behind the attention itself.

With tensor parallelism a rank holds some of the heads over the whole sequence.  The queries are
split by the rank that owns their rows afterwards: attention of one block of queries, its output
projection and its transfer form a pipeline (CommFuse, arXiv 2604.24013: query split).

Legend: ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``A`` query heads and ``G`` key heads of
this rank, ``D`` features of a head, ``H`` hidden, ``N`` ranks, ``q_SBAD`` a tensor of that shape.

Under a causal mask the queries of later ranks see more keys, so that blocks cost differently; the
plan then takes them in the order in which the ranks wait least for the links
(:mod:`~commfuse_npu.plan.block_order`), and adds the partials in that order.

The op stands next to its plain form, which is its reference and its fallback.  The front of the
layer, the projection to q, k and v, is :func:`~commfuse_npu.ops.linear.all_gather_linear`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.attention_arguments import check_self_attention
from commfuse_npu.ops.blocked_attention import AttentionRuns, KeptRuns, blocked_attention
from commfuse_npu.ops.blocked_linear import blocked_linear
from commfuse_npu.ops.collective_functions import reduce_scatter
from commfuse_npu.ops.job import Job, any_grad, even_chunks, options_for_rows, takes_plain_path
from commfuse_npu.ops.linear_arguments import check_divisible, check_linear
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.saved_weight import SavedWeight
from commfuse_npu.ops.weight_gradient import WeightGradient
from commfuse_npu.plan import Kind
from commfuse_npu.runtime.pipeline import Gather, ReduceScatter
from commfuse_npu.runtime.transport import Transport

__all__ = ["attention_linear_reduce_scatter", "plain_attention_linear_reduce_scatter"]


def attention_linear_reduce_scatter(
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
        bias: ``[H]``, whole and the same on every rank; added after the sum.
        causal: a query sees the keys up to its own position; else all of them.
        scale: of the scores, ``D ** -0.5`` by default.
        dropout: has to be 0.
        options: as for :func:`~commfuse_npu.ops.linear.linear_reduce_scatter`.

    Returns:
        ``[s, B, H]``.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other, S is not a multiple
            of the group size, or dropout is asked for.
        MismatchError, TransportError: see :func:`~commfuse_npu.ops.linear.all_gather_linear`.
    """
    name = "attention_linear_reduce_scatter"
    check_self_attention(name, q, k, v, dropout)
    check_linear(name, q.flatten(2), weight, bias, transport, options)
    check_divisible(name, q, transport.size)
    if takes_plain_path(name, q, transport, rows=q.shape[0]):
        return plain_attention_linear_reduce_scatter(
            q, k, v, weight, bias, group=transport.group, causal=causal, scale=scale,
            options=options,
        )  # fmt: skip
    job = Job.of(transport, _options_for(options, q, transport.size, causal), name)
    tensors = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.is_grad_enabled() and any_grad(q, k, v, weight):
        y = _AttentionLinearReduceScatter.apply(*tensors, weight, job, causal, scale)
    else:
        y = _forward(AttentionRuns(*tensors, causal, scale), q, weight, job)
    return y if bias is None else y + bias


def plain_attention_linear_reduce_scatter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
    options: LinearOptions = LinearOptions(),
    same_blocks: bool = False,
) -> torch.Tensor:
    """:func:`attention_linear_reduce_scatter` over the plain collectives; see its arguments.

    Args:
        same_blocks: split the queries, and cut the GEMMs, into the runs of the fused op's plan.
    """
    name = "plain_attention_linear_reduce_scatter"
    check_self_attention(name, q, k, v, dropout)
    check_divisible(name, q, group.size())
    block_rows, batch = q.shape[0] // group.size(), q.shape[1]
    options = _options_for(options, q, group.size(), causal)
    sources = None
    runs: dict[str, Any] = {}
    gemm_runs: dict[str, Any] = {}
    if same_blocks:
        kinds: dict[str, Kind] = {"rows": "reduce_scatter", "grad_rows": "gather"}
        for what, kind in kinds.items():
            plan = options.schedule.plan(kind, group.rank(), group.size())
            runs[what] = plan.computed_rows(block_rows)
        gemms = {
            what: [slice(run.start * batch, run.stop * batch) for run in of]
            for what, of in runs.items()
        }
        gemm_runs = {"rows": gemms["rows"], "dgrad_rows": gemms["grad_rows"]}
        if options.wgrad == "blocks":
            gemm_runs["wgrad_rows"] = gemms["grad_rows"]
        sources = _order_of_additions(options, group)
    attended = blocked_attention(q, k, v, causal=causal, scale=scale, **runs).flatten(2)
    full = blocked_linear(attended, weight, main_grad=options.main_grad, **gemm_runs)
    y = reduce_scatter(full, group, options.reduce_dtype, sources)
    return y if bias is None else y + bias


_TUNED_CHUNKS = 4
"""Instead of trying: attention is long enough to be cut, and on paced links 4 was fastest or within
the spread at every ratio."""


def _options_for(options: LinearOptions, q: torch.Tensor, size: int, causal: bool) -> LinearOptions:
    """No more chunks than rows; under a causal mask blocks in the order that waits least."""
    if options.tuning is not None:
        schedule = replace(options.schedule, chunks=_TUNED_CHUNKS)
        options = replace(options, schedule=schedule, tuning=None)
    options = even_chunks(options_for_rows(options, q.shape[0] // size))
    return (
        replace(options, schedule=options.schedule.for_causal_blocks(size)) if causal else options
    )


def _order_of_additions(options: LinearOptions, group: dist.ProcessGroup) -> list[int] | None:
    """In which order the fused op adds the ranks' partials, if not in the collective's."""
    if options.schedule.costs is None:
        return None
    distances = options.schedule.distances(group.size(), "last")
    return [(group.rank() - distance) % group.size() for distance in (*distances, 0)]


def _forward(
    attention: AttentionRuns,
    q: torch.Tensor,
    weight: torch.Tensor,
    job: Job,
    kept: KeptRuns | None = None,
) -> torch.Tensor:
    y = q.new_empty((q.shape[0] // job.transport.size, q.shape[1], weight.shape[0]))
    transposed = weight.t()
    with ReduceScatter(
        y,
        transport=job.transport,
        plan=job.plan("reduce_scatter"),
        reduce_dtype=job.options.reduce_dtype,
        name=job.name,
        options=job.options,
    ) as scatter:

        def produce(run: slice, out: torch.Tensor) -> None:
            attended, statistics = attention.forward(run)
            gemm_into(_rows(out), _rows(attended.flatten(2)), transposed)
            if kept is not None:
                kept.add(run, attended, statistics)

        scatter.produce(produce)
        return scatter.finish()


class _AttentionLinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight: torch.Tensor,
        job: Job,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        kept = KeptRuns(q)
        y = _forward(AttentionRuns(q, k, v, causal, scale), q, weight, job, kept)
        ctx.save_for_backward(q, k, v, kept.attended, *kept.statistics)
        ctx.where = kept.where
        ctx.weight = SavedWeight(weight)
        ctx.call = job, causal, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job, causal, scale = ctx.call
        weight = ctx.weight.get(job.name)
        q, k, v, attended, *statistics = ctx.saved_tensors
        needs_attention, needs_weight = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        grad = grad.contiguous()
        blocks = job.options.wgrad == "blocks"
        wgrad = whole = attention = None
        if needs_weight:
            wgrad = WeightGradient(weight, main_grad=job.options.main_grad, blocks=blocks)
            if not blocks:
                whole = grad.new_empty((q.shape[0], *grad.shape[1:]))
        if needs_attention:
            attention = AttentionRuns(q, k, v, causal, scale)
            attention.begin_backward()
        with Gather(
            grad,
            transport=job.transport,
            plan=job.plan("gather"),
            gathered=whole,
            name=f"{job.name} backward",
            options=(job.options, needs_attention, needs_weight),
        ) as gather:
            for piece, run in gather.pieces():
                if attention is not None:
                    grad_attended = torch.empty_like(attended[run])
                    gemm_into(_rows(grad_attended.flatten(2)), _rows(piece), weight)
                    attention.backward(
                        run, grad_attended, attended[run], statistics[ctx.where[run.start]]
                    )
                if wgrad is not None and blocks:
                    wgrad.add(_rows(piece), _rows(attended[run].flatten(2)))
            gather.finish()
        if wgrad is not None and whole is not None:
            wgrad.add(_rows(whole), _rows(attended.flatten(2)))
        grads = (None, None, None) if attention is None else attention.gradients()
        return *grads, None if wgrad is None else wgrad.result(), None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[S, B, F]`` as ``[S * B, F]``."""
    return x.view(-1, x.shape[-1])
