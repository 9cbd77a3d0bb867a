"""Tensor-parallel linear layers whose collective is hidden behind their GEMMs.

Legend: ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``I`` input and ``O`` output features of
this rank's weight, ``N`` ranks, ``x_SBI`` a tensor of that shape.  Without a batch dimension
everything holds for ``[S, I]``.  Weights are ``[O, I]``, as in ``torch.nn.Linear``.

====================== ============================= ============================================
op                     forward                       backward
====================== ============================= ============================================
all_gather_linear      x arrives -> GEMM             dgrad -> sum; x arrives again -> wgrad
linear_reduce_scatter  GEMM -> sum                   gradient arrives -> dgrad, wgrad
linear_all_reduce      GEMM -> sum -> sum arrives    no transfers
====================== ============================= ============================================

Each op stands next to its plain form, the same layer over the collectives of torch.distributed,
which is its reference and its fallback: for a group of one, for an empty input.

**Exactness.**  An op and its plain form run with ``same_gemms=True`` give the same bits, if rows
are a multiple of 64 bytes long (MKL rounds small products differently when blocks begin elsewhere).
Against the plain form as it is, results differ only where the GEMM library rounds a run of rows
differently than all rows together.  Weight gradients are one GEMM over all rows unless
``wgrad="blocks"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.ops.blocked_linear import blocked_linear
from commfuse_npu.ops.collective_functions import all_gather, all_reduce, reduce_scatter
from commfuse_npu.ops.job import Job, any_grad, options_for_rows, takes_plain_path
from commfuse_npu.ops.linear_arguments import autocast, check_divisible, check_linear
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.saved_weight import SavedWeight
from commfuse_npu.ops.weight_gradient import WeightGradient
from commfuse_npu.plan import Kind, Schedule, split
from commfuse_npu.runtime.pipeline import Gather, ReduceScatter
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tuning import Problem, tuned

__all__ = [
    "all_gather_linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "plain_all_gather_linear",
    "plain_linear_all_reduce",
    "plain_linear_reduce_scatter",
]


# ------------------------------------------------------------------- all-gather


def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``linear(all_gather(x), weight, bias)``: the column-parallel layer.

    Equals::

        x_SBI = all_gather(x_sBI)
        y_SBO = x_SBI @ weight^T + bias
        # backward
        dx_sBI = reduce_scatter(dy_SBO @ weight)
        dweight = dy_SBO^T @ all_gather(x_sBI)

    Timeline of the backward, rank r of 3::

        compute  | dgrad r+1  | dgrad r+2      | dgrad own r          | wgrad    | sum
        links    | x of r-1   | -> r+1, x of r-2 | -> r+2 ...         | ... last |

    Args:
        x: ``[s, B, I]`` or ``[s, I]``, the same shape on every rank.  Need not be contiguous.
        weight: ``[O, I]``, this rank's rows of the whole weight, the dtype of ``x``.
        bias: ``[O]``.
        transport: lanes of the tensor-parallel group.

    Returns:
        ``[S, B, O]`` or ``[S, O]``.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other.
        MismatchError: another rank calls another op, or with another shape.
        TransportError: a transfer failed.
    """
    name = "all_gather_linear"
    check_linear(name, x, weight, bias, transport, options)
    x, weight, bias = autocast(x, weight, bias)
    if takes_plain_path(name, x, transport, rows=_rows(x)):
        return plain_all_gather_linear(x, weight, bias, group=transport.group, options=options)
    needs_grad = torch.is_grad_enabled() and any_grad(x, weight, bias)
    kinds: tuple[Kind, Kind] = ("gather", "reduce_scatter")
    job = _job(name, transport, options, kinds, _rows(x), weight, needs_grad)
    if job is None:
        return plain_all_gather_linear(x, weight, bias, group=transport.group, options=options)
    flat = x.reshape(-1, x.shape[-1])
    if needs_grad:
        y = _AllGatherLinear.apply(flat, weight, bias, job)
    else:
        y, _ = _all_gather_gemm(flat.contiguous(), weight, bias, job, keep=False)
    return y.view(-1, *x.shape[1:-1], weight.shape[0])


def plain_all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """:func:`all_gather_linear` over the plain collectives.

    Args:
        same_gemms: cut the GEMMs into the runs of rows of the fused op's plan.
    """
    x, weight, bias = autocast(x, weight, bias)
    options = options_for_rows(options, _rows(x))
    runs: dict[str, Any] = {}
    if same_gemms:
        runs["rows"] = _computed_rows(options, "gather", group, _rows(x))
        runs["dgrad_rows"] = _computed_rows(options, "reduce_scatter", group, _rows(x))
        if options.wgrad == "blocks":
            runs["wgrad_rows"] = runs["rows"]
    whole = all_gather(x, group, options.reduce_dtype)
    return blocked_linear(whole, weight, bias, main_grad=options.main_grad, **runs)


def _all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    job: Job,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = x.shape[0] * job.transport.size
    y = x.new_empty((rows, weight.shape[0]))
    whole = x.new_empty((rows, x.shape[1])) if keep else None
    transposed = weight.t()
    with Gather(
        x,
        transport=job.transport,
        plan=job.plan("gather"),
        gathered=whole,
        name=job.name,
        options=job.options,
    ) as gather:
        for piece, run in gather.pieces():
            gemm_into(y[run], piece, transposed)
            if bias is not None:
                y[run].add_(bias)
        gather.finish()
    return y, whole


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: Job
    ) -> torch.Tensor:
        x = x.contiguous()
        keep = job.options.keep_gathered and ctx.needs_input_grad[1]
        y, whole = _all_gather_gemm(x, weight, bias, job, keep=keep)
        ctx.save_for_backward(None if keep or not ctx.needs_input_grad[1] else x, whole)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        weight = ctx.weight.get(job.name)
        x, whole = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        rows = grad.shape[0] // job.transport.size
        blocks = job.options.wgrad == "blocks"
        wgrad = gather = scatter = grad_x = None
        if needs_weight:
            wgrad = WeightGradient(weight, main_grad=job.options.main_grad, blocks=blocks)
        with ExitStack() as stack:
            # On gloo the receives of the sum have to be posted before the sends of the gather; on
            # HCCL nothing of the sum is posted yet, and the gather is first on the lanes.
            if needs_x:
                grad_x = grad.new_empty((rows, weight.shape[1]))
                scatter = stack.enter_context(
                    ReduceScatter(
                        grad_x,
                        transport=job.transport,
                        plan=job.plan("reduce_scatter", schedule=job.backward),
                        reduce_dtype=job.options.reduce_dtype,
                        # Behind the gather: dgrad goes on meanwhile, and wgrad need not wait.
                        queued=x is not None,
                        name=f"{job.name} dgrad",
                        options=(job.options, needs_x, needs_weight),
                    )
                )
            if x is not None:
                if not blocks:
                    whole = x.new_empty((grad.shape[0], x.shape[1]))
                gather = stack.enter_context(
                    Gather(
                        x,
                        transport=job.transport,
                        plan=job.plan("gather", schedule=job.again),
                        gathered=whole,
                        # On HCCL the dgrad blocks would queue behind the whole gather: post a
                        # step of it per block instead. On gloo the host keeps the lanes anyway.
                        ahead=job.transport.lanes if job.transport.batched else None,
                        name=f"{job.name} re-gather",
                        options=(job.options, needs_x, needs_weight),
                    )
                )
            if scatter is not None:

                def produce(run: slice, out: torch.Tensor) -> None:
                    gemm_into(out, grad[run], weight)
                    if gather is not None:
                        gather.advance()

                scatter.produce(produce)
            if gather is not None and blocks and wgrad is not None:
                for piece, run in gather.pieces():
                    wgrad.add(grad[run], piece)
            if gather is not None:
                gather.finish()
            if wgrad is not None and whole is not None:
                # The last dgrad blocks travel while this runs.
                regathered = job.plan("gather", schedule=job.again)
                for run in regathered.computed_rows(rows) if blocks else [slice(None)]:
                    wgrad.add(grad[run], whole[run])
            if scatter is not None:
                scatter.finish()
        grad_weight = None if wgrad is None else wgrad.result()
        grad_bias = grad.sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


# --------------------------------------------------------------- reduce-scatter


def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``reduce_scatter(linear(x, weight)) + bias``: the row-parallel layer.

    Equals::

        y_sBO = reduce_scatter(x_SBI @ weight^T) + bias
        # backward
        dy_SBO = all_gather(dy_sBO)
        dx_SBI = dy_SBO @ weight
        dweight = dy_SBO^T @ x_SBI

    Timeline of the backward, rank r of 3, with ``wgrad="blocks"``; else wgrad runs once, last::

        compute  | dgrad, wgrad own r | dgrad, wgrad r-1 | dgrad, wgrad r-2 |
        links    | dy of r-1          | dy of r-2        |                  |

    Args:
        x: ``[S, B, I]`` or ``[S, I]``; S a multiple of the group size.
        weight: ``[O, I]``, this rank's columns of the whole weight, the dtype of ``x``.
        bias: ``[O]``, whole and the same on every rank; added after the sum.
        transport: lanes of the tensor-parallel group.

    Returns:
        ``[s, B, O]`` or ``[s, O]``.

    Raises:
        TypeError, ValueError: dtypes, devices or shapes do not fit each other, or S is not a
            multiple of the group size.
        MismatchError, TransportError: see :func:`all_gather_linear`.
    """
    name = "linear_reduce_scatter"
    check_linear(name, x, weight, bias, transport, options)
    check_divisible(name, x, transport.size)
    x, weight, bias = autocast(x, weight, bias)
    if takes_plain_path(name, x, transport, rows=_rows(x)):
        return plain_linear_reduce_scatter(x, weight, bias, group=transport.group, options=options)
    needs_grad = torch.is_grad_enabled() and any_grad(x, weight)
    kinds: tuple[Kind, Kind] = ("reduce_scatter", "gather")
    job = _job(name, transport, options, kinds, _rows(x) // transport.size, weight, needs_grad)
    if job is None:
        return plain_linear_reduce_scatter(x, weight, bias, group=transport.group, options=options)
    flat = x.reshape(-1, x.shape[-1])
    if needs_grad:
        y = _LinearReduceScatter.apply(flat, weight, job)
    else:
        y = _gemm_reduce_scatter(flat.contiguous(), weight, job)
    y = y.view(-1, *x.shape[1:-1], weight.shape[0])
    return y if bias is None else y + bias


def plain_linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """:func:`linear_reduce_scatter` over the plain collectives; see also its arguments.

    Args:
        same_gemms: cut the GEMMs into the runs of rows of the fused op's plan.
    """
    check_divisible("plain_linear_reduce_scatter", x, group.size())
    x, weight, bias = autocast(x, weight, bias)
    block_rows = _rows(x) // group.size()
    options = options_for_rows(options, block_rows)
    runs: dict[str, Any] = {}
    if same_gemms:
        runs["rows"] = _computed_rows(options, "reduce_scatter", group, block_rows)
        runs["dgrad_rows"] = _computed_rows(options, "gather", group, block_rows)
        if options.wgrad == "blocks":
            runs["wgrad_rows"] = runs["dgrad_rows"]
    full = blocked_linear(x, weight, main_grad=options.main_grad, **runs)
    y = reduce_scatter(full, group, options.reduce_dtype)
    return y if bias is None else y + bias


def _gemm_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
    y = x.new_empty((x.shape[0] // job.transport.size, weight.shape[0]))
    transposed = weight.t()
    with ReduceScatter(
        y,
        transport=job.transport,
        plan=job.plan("reduce_scatter"),
        reduce_dtype=job.options.reduce_dtype,
        name=job.name,
        options=job.options,
    ) as scatter:
        scatter.produce(lambda run, out: gemm_into(out, x[run], transposed))
        return scatter.finish()


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        return _gemm_reduce_scatter(x, weight, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        weight = ctx.weight.get(job.name)
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        rows = grad.shape[0] * job.transport.size
        blocks = job.options.wgrad == "blocks"
        wgrad = grad_x = whole = None
        if needs_weight:
            wgrad = WeightGradient(weight, main_grad=job.options.main_grad, blocks=blocks)
            if not blocks:
                whole = grad.new_empty((rows, grad.shape[1]))
        if needs_x:
            grad_x = grad.new_empty((rows, weight.shape[1]))
        with Gather(
            grad,
            transport=job.transport,
            plan=job.plan("gather", schedule=job.backward),
            gathered=whole,
            name=f"{job.name} backward",
            options=(job.options, needs_x, needs_weight),
        ) as gather:
            for piece, run in gather.pieces():
                if grad_x is not None:
                    gemm_into(grad_x[run], piece, weight)
                if wgrad is not None and blocks:
                    wgrad.add(piece, x[run])
            gather.finish()
        if wgrad is not None and whole is not None:
            wgrad.add(whole, x)
        return grad_x, None if wgrad is None else wgrad.result(), None


# ------------------------------------------------------------------- all-reduce


def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: Transport,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_reduce(linear(x, weight)) + bias``: row-parallel without sequence parallelism.

    Equals::

        y_SBO = all_reduce(x_SBI @ weight^T) + bias
        # backward, no transfers
        dx_SBI = dy_SBO @ weight
        dweight = dy_SBO^T @ x_SBI

    The rows are cut into ``schedule.chunks`` parts.  A part is reduce-scattered as its blocks are
    made, and its sums are gathered while the next part is made::

        compute  | part 0: for r+1 | own r | part 1: for r+1 | own r |
        links    |                 | -> r+1 | sums of part 0  | -> r+1 | sums of part 1

    The sums of the last part come when there is nothing left to compute: an all-reduce has a tail,
    1/chunks of its second half.  Rows beyond a multiple of the group size take the collective.

    Args:
        x: ``[S, B, I]`` or ``[S, I]``, any S.
        weight: ``[O, I]``, this rank's columns of the whole weight, the dtype of ``x``.
        bias: ``[O]``, whole and the same on every rank; added after the sum.

    Returns:
        ``[S, B, O]`` or ``[S, O]``, the same on every rank.

    Raises:
        TypeError, ValueError, MismatchError, TransportError: see :func:`all_gather_linear`.
    """
    name = "linear_all_reduce"
    check_linear(name, x, weight, bias, transport, options)
    x, weight, bias = autocast(x, weight, bias)
    if takes_plain_path(name, x, transport, rows=_rows(x), at_least=transport.size):
        return plain_linear_all_reduce(x, weight, bias, group=transport.group, options=options)
    job = Job.of(transport, options_for_rows(options, _rows(x) // transport.size), name)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any_grad(x, weight):
        y = _LinearAllReduce.apply(flat, weight, job)
    else:
        y = _gemm_all_reduce(flat.contiguous(), weight, job)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def plain_linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    options: LinearOptions = LinearOptions(),
    same_gemms: bool = False,
) -> torch.Tensor:
    """:func:`linear_all_reduce` over the plain collective.

    Args:
        same_gemms: cut the GEMM into the runs of rows of the fused op's plan, and sum by
            reduce-scatter and all-gather: with more than two ranks an all-reduce has an order of
            additions of its own.
    """
    x, weight, bias = autocast(x, weight, bias)
    rows, size = _rows(x), group.size()
    runs: dict[str, Any] = {}
    parts: list[slice] = []
    if same_gemms and 1 < size <= rows:
        runs["rows"] = _all_reduce_runs(options, group.rank(), size, rows)
        parts = _parts(options, size, rows)
    full = blocked_linear(x, weight, main_grad=options.main_grad, **runs)
    flat = all_reduce(full.view(rows, weight.shape[0]), group, options.reduce_dtype, parts)
    y = flat.view(full.shape)
    return y if bias is None else y + bias


def _parts(options: LinearOptions, size: int, rows: int) -> list[slice]:
    """Runs of rows, multiples of the group size, that are all-reduced one after the other."""
    blocks = rows // size
    bounds = [size * bound for bound in split(blocks, min(options.schedule.chunks, blocks))]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _all_reduce_runs(options: LinearOptions, rank: int, size: int, rows: int) -> list[slice]:
    plan = replace(options.schedule, chunks=1).plan("reduce_scatter", rank, size)
    runs = [
        slice(part.start + run.start, part.start + run.stop)
        for part in _parts(options, size, rows)
        for run in plan.computed_rows((part.stop - part.start) // size)
    ]
    return [*runs, slice(rows - rows % size, rows)] if rows % size else runs


def _gemm_all_reduce(x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
    transport, rank, size = job.transport, job.transport.rank, job.transport.size
    schedule = replace(job.options.schedule, chunks=1)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    transposed = weight.t()
    rest = slice(x.shape[0] - x.shape[0] % size, x.shape[0])
    with ExitStack() as stack:
        gather: Gather | None = None
        for part in _parts(job.options, size, x.shape[0]):
            x_part, y_part = x[part], y[part]
            block = y_part.shape[0] // size
            scatter = stack.enter_context(
                ReduceScatter(
                    y_part[rank * block : (rank + 1) * block],
                    transport=transport,
                    plan=schedule.plan("reduce_scatter", rank, size),
                    reduce_dtype=job.options.reduce_dtype,
                    name=job.name,
                    options=job.options,
                )
            )

            def produce(
                run: slice,
                out: torch.Tensor,
                x_part: torch.Tensor = x_part,
                before: Gather | None = gather,
            ) -> None:
                gemm_into(out, x_part[run], transposed)
                if before is not None:
                    before.advance()

            scatter.produce(produce)
            if gather is not None:
                gather.finish()
            gather = stack.enter_context(
                Gather(
                    scatter.finish(),
                    transport=transport,
                    plan=schedule.plan("gather", rank, size),
                    gathered=y_part,
                    name=f"{job.name} sums",
                    options=job.options,
                )
            )
        if rest.start < rest.stop:
            gemm_into(y[rest], x[rest], transposed)
            total = y[rest].to(job.options.reduce_dtype or y.dtype)
            transport.all_reduce(f"{job.name} rest", total)
            y[rest].copy_(total)
        if gather is not None:
            gather.finish()
    return y


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.main_grad = job.options.main_grad
        return _gemm_all_reduce(x, weight, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        weight = ctx.weight.get("linear_all_reduce")
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            wgrad = WeightGradient(weight, main_grad=ctx.main_grad, blocks=False)
            wgrad.add(grad, x)
            grad_weight = wgrad.result()
        return grad_x, grad_weight, None


# ----------------------------------------------------------- what all three share


def _job(
    name: str,
    transport: Transport,
    options: LinearOptions,
    kinds: tuple[Kind, Kind],
    rows: int,
    weight: torch.Tensor,
    needs_grad: bool,
) -> Job | None:
    """How a layer runs; ``None`` for the plain path, forward and backward.

    Args:
        kinds: of the forward and of the backward.
        rows: of one rank's block.
    """
    options = options_for_rows(options, rows)
    if options.tuning is None:
        return Job.of(transport, options, name)
    outputs, inputs = weight.shape
    halves = [Problem(kinds[0], rows, inputs, outputs, weight.dtype)]
    if needs_grad:
        halves.append(Problem(kinds[1], rows, outputs, inputs, weight.dtype))
    fixed = replace(options, tuning=None)
    found = [
        tuned(
            transport, half, options.schedule, options.tuning,
            _trial(transport, half, fixed, weight.device),
        )
        for half in halves
    ]  # fmt: skip
    if not any(found):
        return None
    # The plain path of one half only is nearest to whole blocks, all under way at once.
    simple = replace(options.schedule, chunks=1, taper=1.0)
    forth, back = (schedule or simple for schedule in (found[0], found[-1]))
    return Job(transport, replace(fixed, schedule=forth), name, back, simple)


def _trial(
    transport: Transport, problem: Problem, options: LinearOptions, device: torch.device
) -> Callable[[Schedule | None], object]:
    """Do the work of ``problem`` on made-up numbers, with a schedule or on the plain path."""
    name = f"tuning {problem.kind}"

    @cache
    def numbers() -> tuple[torch.Tensor, torch.Tensor]:
        rows = problem.block_rows * (1 if problem.kind == "gather" else transport.size)
        x = torch.full((rows, problem.inputs), 0.5, dtype=problem.dtype, device=device)
        weight = torch.full(
            (problem.outputs, problem.inputs), 0.5, dtype=problem.dtype, device=device
        )
        return x, weight

    @torch.no_grad()
    def run(schedule: Schedule | None) -> object:
        x, weight = numbers()
        if schedule is None:
            plain = (
                plain_all_gather_linear if problem.kind == "gather" else plain_linear_reduce_scatter
            )
            return plain(x, weight, group=transport.group, options=options)
        job = Job.of(transport, replace(options, schedule=schedule), name)
        if problem.kind == "gather":
            return _all_gather_gemm(x, weight, None, job, keep=options.keep_gathered)
        return _gemm_reduce_scatter(x, weight, job)

    return run


def _rows(x: torch.Tensor) -> int:
    """``s * B`` rows of GEMM in a tensor ``[s, B, I]``."""
    return math.prod(x.shape[:-1])


def _computed_rows(
    options: LinearOptions, kind: Kind, group: dist.ProcessGroup, block_rows: int
) -> list[slice]:
    return options.schedule.plan(kind, group.rank(), group.size()).computed_rows(block_rows)
