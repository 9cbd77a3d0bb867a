"""Creates the layers of a form, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_reduce_scatter,
)
from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.measure.baselines import Blocking, MegatronOrder, Sliced, in_order
from commfuse_npu.tools.measure.carriers import Carrier, NoTransfers
from commfuse_npu.tools.measure.steps import WORKS
from commfuse_npu.tools.measure.variants import Variant
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "TakingTurns", "form_of"]

_Layer = Callable[..., torch.Tensor]


class Fused:
    """This project's ops.  Tuning decisions are not kept between runs."""

    def __init__(self, transport: Transport, variant: Variant) -> None:
        assert variant.schedule is not None
        tuning = Tuning() if variant.tuned else None
        options = LinearOptions(variant.schedule, wgrad=variant.wgrad, tuning=tuning)
        arguments: dict[str, Any] = {"transport": transport, "options": options}
        self._transport = transport
        self.all_gather_linear: _Layer = partial(all_gather_linear, **arguments)
        self.linear_reduce_scatter: _Layer = partial(linear_reduce_scatter, **arguments)
        self.attention_linear_reduce_scatter: _Layer = partial(
            attention_linear_reduce_scatter, causal=True, **arguments
        )

    def blocked_seconds(self) -> float:
        """Host seconds spent waiting for transfers since the start."""
        return self._transport.blocked_seconds

    pair = staticmethod(in_order)


class TakingTurns(MegatronOrder):
    """Forward-backward overlap: the first step is recorded, later ones run in the chosen order."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self.overlap = ForwardBackwardOverlap([carrier.group], states=())
        self._to_measure = WORKS["micro-batches"].micro_batches - 1

    def pair(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
        if self._to_measure:
            self._to_measure -= 1
            return self.overlap.record(forward, backward)
        if not self.overlap.orders:
            self.overlap.choose_orders()
        return self.overlap.run(forward, backward)


Form = Blocking | Fused
"""The three differentiable layers of which workloads are made; see :mod:`commfuse_npu.ops`."""


def form_of(variant: Variant, transport: Transport, carrier: Carrier) -> Form:
    """The layers of a form.

    Args:
        transport: of the fused ops, with a lane per peer.
        carrier: of the baselines.
    """
    if variant.kind == "fused":
        return Fused(transport, variant)
    if variant.kind == "compute":
        return Blocking(NoTransfers(carrier.group))
    if variant.kind == "sliced":
        return Sliced(carrier, variant.slices)
    layers = {"blocking": Blocking, "megatron": MegatronOrder, "turns": TakingTurns}
    return layers[variant.kind](carrier)
