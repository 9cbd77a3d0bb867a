"""Tunes the schedules of a linear layer: runs trials of its forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch

from commfuse_npu.ops.call import Call
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tuning import COLUMN, Layer, Problem, tuned

__all__ = ["choose_schedules"]


def choose_schedules(
    call: Call,
    layer: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Set the fastest schedules for the forward and the backward of a call, found by trial."""
    options, transport, (outputs, inputs) = call.options, call.transport, weight.shape
    assert isinstance(transport, Transport)
    column = layer == COLUMN
    rows = prod(x.shape[:-1]) // (1 if column else transport.size)
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    schedules = []
    for half in ("forward", "backward") if needs_grad else ("forward",):
        wgrad = options.wgrad if half == "backward" and not column else "whole"
        problem = Problem(layer, half, rows, inputs, outputs, weight.dtype, wgrad)
        trial = _trial(type(call), transport, problem, options, weight.device)
        schedules.append(tuned(transport, problem, options.schedule, options.tuning, trial))
    call.options = replace(options, tuning=None)
    call.schedule, call.backward_schedule = schedules[0], schedules[-1]


def _trial(
    kind: type[Call],
    transport: Transport,
    problem: Problem,
    options: LinearOptions,
    device: torch.device,
) -> Callable[[Schedule | None], object]:
    """A function that runs ``problem`` on random inputs, with a schedule or with collectives."""
    options = replace(options, tuning=None, main_grad=False)

    @cache
    def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block, whole = problem.block_rows, problem.block_rows * transport.size
        x_rows, y_rows = (block, whole) if problem.layer == COLUMN else (whole, block)
        inputs, outputs = problem.inputs, problem.outputs
        draw = torch.Generator(device).manual_seed(0)
        x, grad, weight = (
            torch.randn(shape, generator=draw, device=device).to(problem.dtype)
            for shape in ((x_rows, inputs), (y_rows, outputs), (outputs, inputs))
        )
        return x, grad, weight

    @torch.no_grad()
    def run(schedule: Schedule | None) -> object:
        x, grad, weight = numbers()
        call: Any = kind(f"tuning {problem.layer}", transport, options, x, rows=x.shape[0])
        call.schedule = call.backward_schedule = schedule
        if problem.half == "forward":
            call.needs = False, False, False
            return call.forward(x, weight, *([None] if problem.layer == COLUMN else []))
        call.needs, call.weight = (True, True, False), weight
        call.saved = lambda: (x,)
        return call.backward(grad)

    return run
