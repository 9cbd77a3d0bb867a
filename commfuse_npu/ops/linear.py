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

On a :class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport` an op is the unfused
layer over the collectives of torch.distributed: its reference and its fallback, for a group of one,
for an empty input.

**Exactness.**  An op on lanes and on ``CollectiveTransport(group, same_pieces=True)`` gives the
same bits, if rows are a multiple of 64 bytes long (MKL rounds small products differently when
blocks begin elsewhere).  With whole GEMMs results differ only where the GEMM library rounds a run
of rows differently than all rows.  Weight gradients are one GEMM over all rows; ``wgrad="blocks"``
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
from commfuse_npu.ops.call import (
    AnyRun,
    AnyTransport,
    Call,
    check_and_cast,
    check_sequence,
    rows_of,
)
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.regather import Regather
from commfuse_npu.ops.weight import SavedWeight, WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import column_backward, gather_gemm, gemm_all_reduce, gemm_scatter
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
    transport: AnyTransport,
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
    call = Call.of(name, transport, options, x, rows=rows_of(x))
    call = _scheduled(call, COLUMN, x, weight, bias)
    y = call.apply(_AllGatherLinear, x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(x.shape[0] * transport.size, *x.shape[1:-1], weight.shape[0])


def _column_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: Call,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = x.new_empty((rows * call.transport.size, outputs))
    tensors = {"shard": x, "weight": weight.t(), "out": y}
    if keep:
        tensors["whole"] = x.new_empty((rows * call.transport.size, inputs))
    running = call.begin(gather_gemm, rows, inputs, outputs, keep, None, 0, like=x)
    running.run({}, ahead=False, **tensors)
    if bias is not None:
        y.add_(bias)
    return y, tensors.get("whole")


def _begin_column_backward(
    like: torch.Tensor,
    rows: int,
    weight: torch.Tensor,
    needs_x: bool,
    gathers: bool,
    wgrad: bool,
    call: Call,
) -> AnyRun:
    outputs, inputs = weight.shape
    arguments = rows, inputs, outputs, needs_x, gathers, wgrad
    sums = call.options.reduce_dtype
    return call.begin(column_backward, *arguments, like=like, backward=True, sum_dtype=sums)


def _column_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    whole: torch.Tensor | None,
    weight: torch.Tensor,
    needs_x: bool,
    wgrad: WeightGradient | None,
    call: Call,
    running: AnyRun | None = None,
) -> torch.Tensor | None:
    """The gradient of x; that of the weight goes into ``wgrad``.

    Args:
        x, whole: one of them, if there is a ``wgrad``: this rank's rows, or those of all ranks.
        running: what was begun with ``x``.
    """
    rows = grad.shape[0] // call.transport.size
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
            grad, rows, weight, needs_x, gathers, wgrad is not None, call
        )
    running.run(works, ahead=False, **tensors)
    return tensors.get("grad_x")


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        x = x.contiguous()
        keep = call.options.keep_gathered and ctx.needs_input_grad[1]
        y, whole = _column_forward(x, weight, bias, call, keep=keep)
        ctx.save_for_backward(None if keep or not ctx.needs_input_grad[1] else x, whole)
        ctx.weight = SavedWeight(weight)
        ctx.call = call
        ctx.regather = None
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        if needs_weight and not keep and call.backward is not None:

            def begin(x: torch.Tensor) -> AnyRun:
                return _begin_column_backward(x, x.shape[0], weight, needs_x, True, True, call)

            ctx.regather = Regather(call.transport, ctx, begin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        weight = ctx.weight.get(call.name)
        begun = None if ctx.regather is None else ctx.regather.take()
        (x, running), whole = begun or (None, None), None
        if begun is None:
            x, whole = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        wgrad = _weight_gradient(weight, call, blocks=False) if needs_weight else None
        grad_x = _column_backward(grad, x, whole, weight, needs_x, wgrad, call, running)
        grad_weight = None if wgrad is None else wgrad.result()
        grad_bias = grad.sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


# --------------------------------------------------------------- reduce-scatter


def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
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
    check_sequence(name, x.shape[0], transport.size, ", or use linear_all_reduce")
    call = Call.of(name, transport, options, x, rows=rows_of(x))
    call = _scheduled(call, ROW, x, weight)
    y = call.apply(_LinearReduceScatter, x.reshape(-1, x.shape[-1]), weight)
    y = y.view(x.shape[0] // transport.size, *x.shape[1:-1], weight.shape[0])
    return y if bias is None else y + bias


def _row_forward(x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    rows, (outputs, inputs) = x.shape[0] // call.transport.size, weight.shape
    y = x.new_empty((rows, outputs))
    sums = call.options.reduce_dtype
    running = call.begin(gemm_scatter, rows, inputs, outputs, like=x, sum_dtype=sums)
    running.run(a=x, weight=weight.t(), out=y)
    return y


def _row_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    needs_x: bool,
    wgrad: WeightGradient | None,
    call: Call,
    before: Regather | None = None,
) -> torch.Tensor | None:
    """The gradient of x; that of the weight goes into ``wgrad``, if there is one.

    Args:
        before: the layer before this one, whose input is brought on its way when all of this
            layer's transfers are posted and most of its work is done.
    """
    outputs, inputs = weight.shape
    works: dict[str, Work] = {}
    tensors = {"shard": grad, "weight": weight}
    if needs_x:
        tensors["out"] = grad.new_empty((grad.shape[0] * call.transport.size, inputs))
    if wgrad is not None and x is not None:
        works["wgrad"] = wgrad.add
        tensors["other"] = x
    how = None if wgrad is None else "blocks" if _by_blocks(call) else "whole"
    arguments = grad.shape[0], outputs, inputs if needs_x else 0, False, how, inputs
    running = call.begin(gather_gemm, *arguments, like=grad, backward=True)
    if before is not None and isinstance(running, Running):
        running.before_last = {"wgrad": before.begin}
    running.run(works, ahead=False, **tensors)
    return tensors.get("out")


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.call = call
        ctx.before = Regather.before(call.transport) if any(ctx.needs_input_grad) else None
        return _row_forward(x, weight, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        weight = ctx.weight.get(call.name)
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        wgrad = _weight_gradient(weight, call, _by_blocks(call)) if needs_weight else None
        grad_x = _row_backward(grad.contiguous(), x, weight, needs_x, wgrad, call, ctx.before)
        return grad_x, None if wgrad is None else wgrad.result(), None


# ------------------------------------------------------------------- all-reduce


def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
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
    call = Call.of(name, transport, options, x, rows=rows_of(x), at_least=transport.size)
    y = call.apply(_LinearAllReduce, x.reshape(-1, x.shape[-1]), weight)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _gemm_all_reduce(x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    (outputs, inputs), transport = weight.shape, call.transport
    rows, rest = x.shape[0], x.shape[0] % transport.size
    y = x.new_empty((rows, outputs))
    divisible = slice(0, rows - rest)
    if divisible.stop:
        sums = call.options.reduce_dtype
        arguments = divisible.stop, inputs, outputs
        running = call.begin(gemm_all_reduce, *arguments, like=x, sum_dtype=sums)
        running.run(a=x[divisible], weight=weight.t(), out=y[divisible])
    if rest:
        left = slice(rows - rest, rows)
        gemm_into(y[left], x[left], weight.t())
        total = y[left].to(call.options.reduce_dtype or y.dtype)
        transport.all_reduce(f"{call.name} rest", total)
        y[left].copy_(total)
    return y


class _LinearAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.weight = SavedWeight(weight)
        ctx.main_grad = call.options.main_grad
        return _gemm_all_reduce(x, weight, call)

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


def _weight_gradient(weight: torch.Tensor, call: Call, blocks: bool) -> WeightGradient:
    return WeightGradient(weight, main_grad=call.options.main_grad, blocks=blocks)


def _by_blocks(call: Call) -> bool:
    """Whether a row-parallel layer makes its weight gradient block by block."""
    return call.options.wgrad == "blocks" and call.backward is not None


def _scheduled(
    call: Call,
    layer: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> Call:
    """With the schedules of a layer's forward and backward, tried out if the options say so."""
    options, transport, (outputs, inputs) = call.options, call.transport, weight.shape
    if options.tuning is None or not isinstance(transport, Transport):
        covered = layer == COLUMN and options.by_collectives(outputs)
        return call._replace(backward=None) if covered else call
    rows = rows_of(x) if layer == COLUMN else rows_of(x) // transport.size
    given = [one for one in (x, weight, bias) if one is not None]
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    found = []
    for half in ("forward", "backward") if needs_grad else ("forward",):
        wgrad = options.wgrad if half == "backward" and layer == ROW else "whole"
        kept = options.keep_gathered and layer == COLUMN
        problem = Problem(layer, half, rows, inputs, outputs, weight.dtype, wgrad, kept)
        trial = _trial(transport, problem, options, weight.device)
        found.append(tuned(transport, problem, options.schedule, options.tuning, trial))
    untuned = replace(options, tuning=None)
    return call._replace(options=untuned, forward=found[0], backward=found[-1])


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
        call = Call(transport, options, f"tuning {problem.layer}", schedule, schedule)
        if problem.half == "forward":
            if column:
                return _column_forward(x, weight, None, call, keep=options.keep_gathered)
            return _row_forward(x, weight, call)
        wgrad = _weight_gradient(weight, call, not column and _by_blocks(call))
        if not column:
            return _row_backward(grad, x, weight, True, wgrad, call)
        if options.keep_gathered:
            whole = x.repeat(transport.size, 1)
            return _column_backward(grad, None, whole, weight, True, wgrad, call)
        return _column_backward(grad, x, None, weight, True, wgrad, call)

    return run
