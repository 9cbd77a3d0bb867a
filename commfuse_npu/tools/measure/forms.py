"""The forms in which the same layers run, by name.

================  ================================================================================
``p2p``           blocking: a collective, then the GEMM, or the other way round.  **The reference**:
                  on a CPU its collectives are direct exchanges with all peers at once, at the rate
                  of the links, so no comparison benefits from a slow collective algorithm.
``slices-K``      the rows in K slices, a collective per slice, pipelined with the GEMMs: what
                  MindSpeed's CoC does, implemented from its description.
``megatron``      forward blocking; backward in Megatron's order: the input is gathered during
                  dgrad, the reduce-scatter runs during wgrad.
``ours-cK``       this project's ops, K chunks per block, as many lanes as peers.
``auto[-wgrad]``  this project's ops with the schedule, or the plain path, that tuning measures as
                  the fastest on first use over these links (:mod:`commfuse_npu.tuning`).
                  ``-wgrad``: weight gradients per arriving block, which rounds differently.
``fb-overlap``    the forward of a micro-batch overlapped with the backward of the previous one
                  (:mod:`commfuse_npu.overlap`), with the transfers of ``megatron``.
``compute``       the computation without any communication, measured in every round.
================  ================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_reduce_scatter,
)
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.plan import Schedule, split
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.measure.baselines import (
    Baseline,
    Blocking,
    Carrier,
    Computation,
    MegatronOrder,
    Sliced,
)
from commfuse_npu.tools.measure.steps import COMPUTE, REFERENCE, WORKS
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "TakingTurns", "form_of"]

_RUNS = 8
"""Runs of queries in the attention of baselines, a kernel each.  As in the fused form, masked parts
are skipped; the number equals the blocks of eight ranks."""

_Call = Callable[[], Any]


class Form:
    """The differentiable layers of which workloads are made, on lanes or as a baseline."""

    def __init__(
        self, transport: Transport | Baseline, options: LinearOptions = LinearOptions()
    ) -> None:
        self.transport = transport
        self._of: dict[str, Any] = {"transport": transport, "options": options}

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[s, ..., I] -> [S, ..., O]``."""
        return all_gather_linear(x, weight, **self._of)

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[S, ..., I] -> [s, ..., O]``."""
        return linear_reduce_scatter(x, weight, **self._of)

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """``q [S, B, A, D]``, k and v ``[S, B, G, D] -> [s, B, O]``, causal."""
        if isinstance(self.transport, Transport):
            return attention_linear_reduce_scatter(q, k, v, weight, causal=True, **self._of)
        attended: torch.Tensor = _Attention.apply(q, k, v)
        return self.linear_reduce_scatter(attended.flatten(2), weight)

    def pair(self, forward: _Call, backward: _Call) -> tuple[Any, Any]:
        """Run the forward of one micro-batch and the backward of another; return both results."""
        result = backward()
        return forward(), result


class TakingTurns(Form):
    """Forward-backward overlap: the first step is recorded, later ones run in the chosen order."""

    def __init__(self, transport: Baseline) -> None:
        super().__init__(transport)
        self.overlap = ForwardBackwardOverlap([transport.group], states=())
        self._to_measure = WORKS["micro-batches"].micro_batches - 1

    def pair(self, forward: _Call, backward: _Call) -> tuple[Any, Any]:
        if self._to_measure:
            self._to_measure -= 1
            return self.overlap.record(forward, backward)
        if not self.overlap.orders:
            self.overlap.choose_orders()
        return self.overlap.run(forward, backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        ctx.runs = AttentionRuns(causal=True)
        ctx.runs.begin(q, k, v, keep=True)
        for run in _runs(q):
            ctx.runs.forward(run)
        attended, *others = ctx.runs.saved()
        ctx.save_for_backward(attended, *others)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        runs, grad = ctx.runs, grad.contiguous()
        runs.resume(ctx.saved_tensors)
        for run in _runs(grad):
            runs.backward(grad[run], run)
        return runs.gradients()


def _runs(queries: torch.Tensor) -> list[slice]:
    return [slice(*run) for run in pairwise(split(queries.shape[0], _RUNS))]


def form_of(name: str, transport: Transport, carrier: Carrier) -> Form:
    """The layers of the form of this name.

    Args:
        transport: of the fused ops, with a lane per peer.  Their tuning is not kept between runs.
        carrier: of the baselines.
    """
    match name.split("-"):
        case ["ours", chunks]:
            schedule = Schedule("shifted", transport.lanes, int(chunks.removeprefix("c")))
            return Form(transport, LinearOptions(schedule))
        case ["auto", *by_blocks]:
            schedule = Schedule("shifted", transport.lanes)
            wgrad: Wgrad = "blocks" if by_blocks else "whole"
            return Form(transport, LinearOptions(schedule, wgrad=wgrad, tuning=Tuning()))
        case ["slices", slices]:
            return Form(Baseline(carrier, partial(Sliced, slices=int(slices))))
        case ["fb", "overlap"]:
            return TakingTurns(Baseline(carrier, MegatronOrder))
    runs = {COMPUTE: Computation, REFERENCE: Blocking, "megatron": MegatronOrder}
    return Form(Baseline(carrier, runs[name]))
