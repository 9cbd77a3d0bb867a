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

Each op has a plain form, the same layer over the collectives of torch.distributed, in
:mod:`commfuse_npu.reference.linear`: its reference and its fallback, for a group of one, for an
empty input.

**Exactness.**  An op and its plain form run with ``same_gemms=True`` give the same bits, if rows
are a multiple of 64 bytes long (MKL rounds small products differently when blocks begin elsewhere).
Against the plain form as it is, results differ only where the GEMM library rounds a run of rows
differently than all rows together.  Weight gradients are one GEMM over all rows; ``wgrad="blocks"``
makes that of a row-parallel layer block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import gemm_into
from commfuse_npu.layers.linear_arguments import check_and_cast, check_divisible, rows_of
from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.layers.weight_gradient import WeightGradient
from commfuse_npu.ops.job import Job, any_grad, takes_plain_path
from commfuse_npu.ops.regather import Regather
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Compute
from commfuse_npu.plan.rules import column_backward, gather_gemm, gemm_all_reduce, gemm_scatter
from commfuse_npu.reference.collective_functions import reduce_scatter_in
from commfuse_npu.reference.linear import (
    plain_all_gather_linear,
    plain_linear_all_reduce,
    plain_linear_reduce_scatter,
)
from commfuse_npu.runtime.collectives import (
    all_gather_rows,
    begin_all_gather,
    begin_reduce_scatter,
)
from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tuning import COLUMN, ROW, Layer, Problem, tuned

__all__ = [
    "all_gather_linear",
    "linear_all_reduce",
    "linear_reduce_scatter",
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

    Timeline of the backward, 2 chunks::

        compute  | dgrad, columns 0 | dgrad, columns 1 | wgrad                | sums
        links    | x arrives ...    | ... columns 0 to their ranks | columns 1

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
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_all_gather_linear(x, weight, bias, group=transport.group, options=options)
    needs_grad = torch.is_grad_enabled() and any_grad(x, weight, bias)
    job = _job(name, transport, options, COLUMN, rows_of(x), weight, needs_grad)
    flat = x.reshape(-1, x.shape[-1])
    if needs_grad:
        y = _AllGatherLinear.apply(flat, weight, bias, job)
    else:
        y, _ = _column_forward(flat.contiguous(), weight, bias, job, keep=False)
    return y.view(-1, *x.shape[1:-1], weight.shape[0])


def _column_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    job: Job,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    whole: torch.Tensor | None = None
    if job.forward is None:
        with job.transport.collectives(job.name):
            whole = all_gather_rows(x, job.transport.group)
        y = torch.mm(whole, weight.t())
    else:
        y = x.new_empty((rows * job.transport.size, outputs))
        tensors = {"shard": x, "weight": weight.t(), "out": y}
        if keep:
            whole = tensors["whole"] = x.new_empty((rows * job.transport.size, inputs))
        program = gather_gemm(job.place(job.forward), rows, inputs, outputs, keep, None, 0)
        running = job.transport.begin(program, job.name, x, job.options)
        running.run({}, ahead=False, **tensors)
    if bias is not None:
        y.add_(bias)
    return y, whole if keep else None


def _begin_column_backward(
    like: torch.Tensor,
    rows: int,
    weight: torch.Tensor,
    needs_x: bool,
    gathers: bool,
    wgrad: bool,
    job: Job,
) -> Running:
    outputs, inputs = weight.shape
    place = job.place(job.backward)
    program = column_backward(place, rows, inputs, outputs, needs_x, gathers, wgrad)
    name, options = f"{job.name} backward", job.options
    return job.transport.begin(program, name, like, options, options.reduce_dtype)


def _column_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    whole: torch.Tensor | None,
    weight: torch.Tensor,
    needs_x: bool,
    wgrad: WeightGradient | None,
    job: Job,
    running: Running | None = None,
) -> torch.Tensor | None:
    """The gradient of x; that of the weight goes into ``wgrad``.

    Args:
        x, whole: one of them, if there is a ``wgrad``: this rank's rows, or those of all ranks.
        running: what was begun with ``x``.
    """
    if job.backward is None:
        with job.transport.collectives(f"{job.name} backward"):
            return _in_megatron_order(grad, x, whole, weight, needs_x, wgrad, job)
    rows = grad.shape[0] // job.transport.size
    works: dict[str, Work] = {}
    tensors = {"grad": grad, "weight": weight}
    if needs_x:
        tensors["grad_x"] = grad.new_empty((rows, weight.shape[1]))
    if wgrad is not None:
        works["wgrad"] = wgrad.add
        if x is not None:
            tensors["x"] = x
        elif whole is not None:
            tensors["whole"] = whole
    if running is None:
        gathers = wgrad is not None and x is not None
        running = _begin_column_backward(
            grad, rows, weight, needs_x, gathers, wgrad is not None, job
        )
    running.run(works, ahead=False, **tensors)
    return tensors.get("grad_x")


def _in_megatron_order(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    whole: torch.Tensor | None,
    weight: torch.Tensor,
    needs_x: bool,
    wgrad: WeightGradient | None,
    job: Job,
) -> torch.Tensor | None:
    """:func:`_column_backward` by torch's collectives: x arrives behind dgrad, whose sum travels
    behind wgrad (read in Megatron-Core's ``LinearWithGradAccumulationAndAsyncCommunication``)."""
    group, reduce_dtype = job.transport.group, job.options.reduce_dtype
    gathered: Any = None
    if wgrad is not None and x is not None:
        whole, gathered = begin_all_gather(x, group)
    grad_x = summed = None
    if needs_x:
        full = torch.mm(grad, weight)
        grad_x, summed = begin_reduce_scatter(full.to(reduce_dtype or full.dtype), group)
    if gathered is not None:
        job.transport.wait_for(gathered)
    if wgrad is not None and whole is not None:
        wgrad.add(grad, whole)
    if summed is not None:
        job.transport.wait_for(summed)
    return None if grad_x is None else grad_x.to(grad.dtype)


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, job: Job
    ) -> torch.Tensor:
        x = x.contiguous()
        keep = job.options.keep_gathered and ctx.needs_input_grad[1]
        y, whole = _column_forward(x, weight, bias, job, keep=keep)
        ctx.save_for_backward(None if keep or not ctx.needs_input_grad[1] else x, whole)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        ctx.regather = None
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if needs_weight and not keep and job.backward is not None:

            def begin(x: torch.Tensor) -> Running:
                return _begin_column_backward(x, x.shape[0], weight, needs_x, True, True, job)

            ctx.regather = Regather(job.transport, ctx, begin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        weight = ctx.weight.get(job.name)
        begun = None if ctx.regather is None else ctx.regather.take()
        (x, running), whole = begun or (None, None), None
        if begun is None:
            x, whole = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        wgrad = _weight_gradient(weight, job, blocks=False) if needs_weight else None
        grad_x = _column_backward(grad, x, whole, weight, needs_x, wgrad, job, running)
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
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    check_divisible(name, x, transport.size)
    if takes_plain_path(name, x, transport, rows=rows_of(x)):
        return plain_linear_reduce_scatter(x, weight, bias, group=transport.group, options=options)
    needs_grad = torch.is_grad_enabled() and any_grad(x, weight)
    job = _job(name, transport, options, ROW, rows_of(x) // transport.size, weight, needs_grad)
    flat = x.reshape(-1, x.shape[-1])
    if needs_grad:
        y = _LinearReduceScatter.apply(flat, weight, job)
    else:
        y = _row_forward(flat.contiguous(), weight, job)
    y = y.view(-1, *x.shape[1:-1], weight.shape[0])
    return y if bias is None else y + bias


def _row_forward(x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
    rows, (outputs, inputs) = x.shape[0] // job.transport.size, weight.shape
    reduce_dtype = job.options.reduce_dtype
    if job.forward is None:
        with job.transport.collectives(job.name):
            return reduce_scatter_in(torch.mm(x, weight.t()), job.transport.group, reduce_dtype)
    y = x.new_empty((rows, outputs))
    program = gemm_scatter(job.place(job.forward), rows, inputs, outputs)
    running = job.transport.begin(program, job.name, x, job.options, reduce_dtype)
    running.run(a=x, weight=weight.t(), out=y)
    return y


def _row_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    needs_x: bool,
    wgrad: WeightGradient | None,
    job: Job,
    before: Regather | None = None,
) -> torch.Tensor | None:
    """The gradient of x; that of the weight goes into ``wgrad``, if there is one.

    Args:
        before: the layer before this one, whose input is brought on its way when all of this
            layer's transfers are posted and most of its work is done.
    """
    outputs, inputs = weight.shape
    if job.backward is None:
        with job.transport.collectives(f"{job.name} backward"):
            whole = all_gather_rows(grad, job.transport.group)
        grad_x = torch.mm(whole, weight) if needs_x else None
        if before is not None:
            before.begin()
        if wgrad is not None and x is not None:
            wgrad.add(whole, x)
        return grad_x
    works: dict[str, Work] = {}
    tensors = {"shard": grad, "weight": weight}
    if needs_x:
        tensors["out"] = grad.new_empty((grad.shape[0] * job.transport.size, inputs))
    if wgrad is not None and x is not None:
        works["wgrad"] = wgrad.add
        tensors["other"] = x
    program = gather_gemm(
        job.place(job.backward),
        grad.shape[0],
        outputs,
        inputs if needs_x else 0,
        False,
        None if wgrad is None else job.options.wgrad,
        inputs,
    )
    if wgrad is not None and before is not None:
        works["wgrad"] = _begun_before_the_last(before, wgrad.add, program.count(Compute, "wgrad"))
    running = job.transport.begin(program, f"{job.name} backward", grad, job.options)
    running.run(works, ahead=False, **tensors)
    return tensors.get("out")


def _begun_before_the_last(before: Regather, add: Work, calls: int) -> Work:
    """``add``, which is called so many times."""

    def begin_and_add(*tensors: torch.Tensor) -> None:
        nonlocal calls
        calls -= 1
        if not calls:
            before.begin()
        add(*tensors)

    return begin_and_add


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.job = job
        ctx.before = Regather.before(job.transport)
        return _row_forward(x, weight, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: Job = ctx.job
        weight = ctx.weight.get(job.name)
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        wgrad = _weight_gradient(weight, job, _by_blocks(job)) if needs_weight else None
        grad_x = _row_backward(grad.contiguous(), x, weight, needs_x, wgrad, job, ctx.before)
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
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    if takes_plain_path(name, x, transport, rows=rows_of(x), at_least=transport.size):
        return plain_linear_all_reduce(x, weight, bias, group=transport.group, options=options)
    job = Job.of(transport, options, name)
    flat = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any_grad(x, weight):
        y = _LinearAllReduce.apply(flat, weight, job)
    else:
        y = _gemm_all_reduce(flat.contiguous(), weight, job)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _gemm_all_reduce(x: torch.Tensor, weight: torch.Tensor, job: Job) -> torch.Tensor:
    (outputs, inputs), transport = weight.shape, job.transport
    rows, rest = x.shape[0], x.shape[0] % transport.size
    y = x.new_empty((rows, outputs))
    program = gemm_all_reduce(job.place(), rows - rest, inputs, outputs)
    running = transport.begin(program, job.name, x, job.options, job.options.reduce_dtype)
    divisible = slice(0, rows - rest)
    running.run(a=x[divisible], weight=weight.t(), out=y[divisible])
    if rest:
        left = slice(rows - rest, rows)
        gemm_into(y[left], x[left], weight.t())
        total = y[left].to(job.options.reduce_dtype or y.dtype)
        transport.all_reduce(f"{job.name} rest", total)
        y[left].copy_(total)
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


def _weight_gradient(weight: torch.Tensor, job: Job, blocks: bool) -> WeightGradient:
    return WeightGradient(weight, main_grad=job.options.main_grad, blocks=blocks)


def _by_blocks(job: Job) -> bool:
    """Whether a row-parallel layer makes its weight gradient block by block."""
    return job.options.wgrad == "blocks" and job.backward is not None


def _job(
    name: str,
    transport: Transport,
    options: LinearOptions,
    layer: Layer,
    rows: int,
    weight: torch.Tensor,
    needs_grad: bool,
) -> Job:
    """How a layer runs, forward and backward.

    Args:
        rows: of one rank's block.
    """
    outputs, inputs = weight.shape
    if options.tuning is None:
        job = Job.of(transport, options, name)
        covered = layer == COLUMN and options.by_collectives(outputs)
        return job._replace(backward=None) if covered else job
    found = []
    for half in ("forward", "backward") if needs_grad else ("forward",):
        wgrad = options.wgrad if half == "backward" and layer == ROW else "whole"
        kept = options.keep_gathered and layer == COLUMN
        problem = Problem(layer, half, rows, inputs, outputs, weight.dtype, wgrad, kept)
        trial = _trial(transport, problem, options, weight.device)
        found.append(tuned(transport, problem, options.schedule, options.tuning, trial))
    return Job(transport, replace(options, tuning=None), name, found[0], found[-1])


def _trial(
    transport: Transport, problem: Problem, options: LinearOptions, device: torch.device
) -> Callable[[Schedule | None], object]:
    """Do the work of ``problem`` on made-up numbers, with a schedule or by torch's collectives."""
    options = replace(options, tuning=None, main_grad=False)
    column = problem.layer == COLUMN

    @cache
    def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = problem.block_rows * transport.size
        x_rows, y_rows = (problem.block_rows, whole) if column else (whole, problem.block_rows)
        shapes = (x_rows, problem.inputs), (y_rows, problem.outputs)
        weight = problem.outputs, problem.inputs
        draw = torch.Generator(device).manual_seed(0)
        x, grad, factor = (
            torch.randn(shape, generator=draw, device=device).to(problem.dtype)
            for shape in (*shapes, weight)
        )
        return x, grad, factor

    @torch.no_grad()
    def run(schedule: Schedule | None) -> object:
        x, grad, weight = numbers()
        job = Job(transport, options, f"tuning {problem.layer}", schedule, schedule)
        if problem.half == "forward":
            if column:
                return _column_forward(x, weight, None, job, keep=options.keep_gathered)
            return _row_forward(x, weight, job)
        wgrad = _weight_gradient(weight, job, not column and _by_blocks(job))
        if not column:
            return _row_backward(grad, x, weight, True, wgrad, job)
        if options.keep_gathered:
            whole = x.repeat(transport.size, 1)
            return _column_backward(grad, None, whole, weight, True, wgrad, job)
        return _column_backward(grad, x, None, weight, True, wgrad, job)

    return run
