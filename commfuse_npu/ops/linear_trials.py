"""Tunes the schedules of a linear layer: runs trials of its forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from commfuse_npu.ops.call import Call
from commfuse_npu.ops.tuning import tuned
from commfuse_npu.plan import Schedule

__all__ = ["choose_schedules"]


def choose_schedules(
    call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> None:
    """Set the fastest schedules for the forward and the backward of a call, found by trial.

    A trial runs the whole half of the layer: the backward with the gradients of input and weight.

    Args:
        x: the input, also of the trials, in which the gradient of the output is all ones.
        rows: of the output.
    """
    transport: Any = call.transport
    options = replace(call.options, tuning=None)
    kind = type(call)
    quiet = replace(options, main_grad=False)

    @torch.no_grad()
    def run(half: str, schedule: Schedule | None) -> object:
        trial: Any = kind(f"tuning {call.name}", transport, quiet, x, rows=x.shape[0])
        trial.schedule = trial.backward_schedule = schedule
        needed = half == "backward"
        trial.needs = (needed, needed, False)
        trial.weight = weight
        trial.saved = lambda: (x.contiguous(),)  # as the forward saves it
        if half == "forward":
            return trial.forward(x, weight)
        return trial.backward(x.new_ones(rows, weight.shape[0]))

    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    chosen = []
    for half in ("forward", "backward") if needs_grad else ("forward",):
        shape = f"{x.shape[0]} rows, weight {[*weight.shape]} of {weight.dtype}"
        problem = f"the {half} of {call.name}, {shape}"
        given = transport, problem, min(x.shape[0], rows), options.schedule, call.options.tuning
        chosen.append(tuned(*given, partial(run, half)))
    call.options = options
    call.schedule = chosen[0]
    call.backward_schedule = chosen[-1]
