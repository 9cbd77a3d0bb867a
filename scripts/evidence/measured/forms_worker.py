"""What a rank does to compare forms of a layer: the forms by name, the workloads, the rounds.

================  ================================================================================
``p2p``           :class:`.Blocking`, **the reference**: by direct exchanges at the rate of the
                  links, so no comparison benefits from a slow collective algorithm
``slices-K``      :class:`.Sliced`: CoC, implemented from its description
``megatron``      :class:`.MegatronOrder`
``ours-cK``       this project's ops, K chunks per block, as many lanes as peers
``auto``          the same with the schedule, or the plain path, that :mod:`commfuse_npu.ops.tuning`
                  measures as the fastest over these links
``compute``       :class:`.Computation`, measured in every round
================  ================================================================================

Legend: ``S`` sequence, ``s`` its shard (S/n), ``H`` hidden, ``F`` this rank's part of the MLP's
width, ``A`` and ``G`` its query and key heads, ``D`` features of a head.  Micro-batch 1.
"""

import gc
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from commfuse_npu.ops.tuning import Tuning, decisions
from commfuse_npu.plan import Schedule, split
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.measure.measuring_steps import Scale
from commfuse_npu.tools.measure.measuring_worker import Worker
from scripts.cpu_pretraining.wire import pace
from scripts.evidence.measured.baselines import (
    Baseline,
    Blocking,
    Computation,
    MegatronOrder,
    Sliced,
)
from scripts.evidence.measured.rounds import Sample
from scripts.evidence.measured.sleeping import SleepingGemms
from scripts.evidence.measured.works import COMPUTE, NAMES, REFERENCE, TUNED, WORKS

_RUNS = 8
"""Runs of queries in the attention of baselines, a kernel each.  As in the fused form, masked parts
are skipped; the number equals the blocks of eight ranks."""

_Weights = dict[str, torch.Tensor]


class LayerForm:
    """How ops run, on lanes or as a baseline: ``of`` are the keywords of every op."""

    def __init__(
        self,
        transport: Transport | Baseline,
        options: LinearOptions = LinearOptions(),
    ) -> None:
        self.transport = transport
        self.of: dict[str, Any] = {"group": transport, "options": options}


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
        runs = ctx.runs
        grad = grad.contiguous()
        runs.resume(ctx.saved_tensors)
        for run in _runs(grad):
            runs.backward(grad[run], run)
        return runs.gradients()


def _runs(queries: torch.Tensor) -> list[slice]:
    return [slice(*run) for run in pairwise(split(queries.shape[0], _RUNS))]


def form_of(name: str, transport: Transport) -> LayerForm:
    """The form of this name; the tuning of fused ops is not kept between runs."""
    match name.split("-"):
        case ["ours", chunks]:
            schedule = Schedule("shifted", transport.lanes, int(chunks.removeprefix("c")))
            return LayerForm(transport, LinearOptions(schedule))
        case ["auto"]:
            schedule = Schedule("shifted", transport.lanes)
            return LayerForm(transport, LinearOptions(schedule, tuning=Tuning()))
        case ["slices", slices]:
            return LayerForm(Baseline(transport, partial(Sliced, slices=int(slices))))
    runs = {COMPUTE: Computation, REFERENCE: Blocking, "megatron": MegatronOrder}
    return LayerForm(Baseline(transport, runs[name]))


# ------------------------------------------------------------------- workloads


class Work:
    """One workload on one rank: its weights, its input and its computation.

    It excludes rotary embeddings, the optimizer and the gradients of the norms' weights.
    """

    def __init__(self, name: str, scale: Scale, *, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        size = scale.ranks
        hidden = scale.hidden
        self._head = scale.head
        self._heads = scale.heads // size
        self._groups = scale.groups // size
        shard = scale.rows // size
        ffn = scale.ffn // size
        inner = self._heads * scale.head
        self._layers: list[_Weights] = []
        for _ in range(WORKS[name].layers):
            weights = {
                "gate_up": self._draw(2 * ffn, hidden, scale=hidden**-0.5),
                "down": self._draw(hidden, ffn, scale=scale.ffn**-0.5),
            }
            if name != "mlp":
                wide = (self._heads + 2 * self._groups) * scale.head
                weights["qkv"] = self._draw(wide, hidden, scale=hidden**-0.5)
                weights["out"] = self._draw(hidden, inner, scale=(inner * size) ** -0.5)
            self._layers.append(weights)
        self._layer = self._mlp if name == "mlp" else self._whole_layer
        self._x = self._draw(shard, 1, hidden)
        self._grad = self._draw(shard, 1, hidden).detach()

    def run(self, form: LayerForm) -> list[Any]:
        """Run it once; returns the output, then the gradients of the input and the weights."""
        leaves = [self._x, *(weight for layer in self._layers for weight in layer.values())]
        for leaf in leaves:
            leaf.grad = None
        y = self._x
        for weights in self._layers:
            y = self._layer(form, y, weights)
        y.backward(self._grad)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    def _draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).requires_grad_()

    def _mlp(self, form: LayerForm, x: torch.Tensor, weights: _Weights) -> torch.Tensor:
        gate, up = all_gather_linear(x, weights["gate_up"], **form.of).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        return linear_reduce_scatter(hidden, weights["down"], **form.of)

    def _attention(self, form: LayerForm, x: torch.Tensor, weights: _Weights) -> torch.Tensor:
        heads = all_gather_linear(x, weights["qkv"], **form.of).unflatten(-1, (-1, self._head))
        parts = heads.split([self._heads, self._groups, self._groups], dim=2)
        q, k, v = (part.contiguous() for part in parts)
        if isinstance(form.transport, Transport):
            return attention_linear_reduce_scatter(q, k, v, weights["out"], causal=True, **form.of)
        attended: torch.Tensor = _Attention.apply(q, k, v)
        return linear_reduce_scatter(attended.flatten(2), weights["out"], **form.of)

    def _whole_layer(self, form: LayerForm, x: torch.Tensor, weights: _Weights) -> torch.Tensor:
        x = x + self._attention(form, _norm(x), weights)
        return x + self._mlp(form, _norm(x), weights)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:])


# ------------------------------------------------------------------- ranks


class FormsWorker(Worker):
    """One rank, over gloo; all ranks get the same calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_flush_denormal(True)  # a sleeping GEMM leaves arbitrary numbers

    # Of the sockets of all groups, which are all sockets of this process.
    pace = staticmethod(pace)

    def set_up(self, work: str, scale: Scale, gflops: float | None) -> None:
        """Create the weights and inputs of a workload, and forget what was tuned for others.

        Args:
            gflops: let GEMMs sleep, modeled at this speed; ``None`` for real ones.
        """
        self._work = Work(work, scale, rank=self.rank)
        self._scale = scale
        self._gflops = gflops
        self._reference: list[torch.Tensor] = []
        decisions(self.transport).clear()
        self.transport.scratch.clear()  # its buffers have other shapes
        names = COMPUTE, *NAMES
        self._forms = {name: form_of(name, self.transport) for name in names}

    def check(self, name: str) -> float:
        """The largest difference of a form's outputs and gradients from the reference's.

        0 if all are equal, infinite if one is not a number.  GEMMs are real, except that a form
        which tunes itself runs before as it will be timed.  It also warms up.
        """
        if name == TUNED:
            with self._gemms():
                self._work.run(self._forms[name])
        if not self._reference:
            results = self._work.run(self._forms[REFERENCE])
            self._reference = [result.clone() for result in results]
        results = self._work.run(self._forms[name])
        differences = [
            float((result.float() - other.float()).abs().max())
            for result, other in zip(results, self._reference, strict=True)
        ]
        return math.inf if any(map(math.isnan, differences)) else max(differences)

    def round(self, order: Sequence[str]) -> list[Sample]:
        gc.collect()
        gc.disable()
        try:
            return [self._sample(self._forms[name]) for name in order]
        finally:
            gc.enable()

    def _sample(self, form: LayerForm) -> Sample:
        with self._gemms():
            start = self._stopwatch.together()
            blocked = form.transport.blocked_seconds
            self._work.run(form)
            return Sample(self._stopwatch.now() - start, form.transport.blocked_seconds - blocked)

    def _gemms(self) -> AbstractContextManager[object]:
        if self._gflops is None:
            return nullcontext()
        return SleepingGemms(self._gflops, self._scale.shrink)
