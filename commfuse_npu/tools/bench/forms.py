"""Creates the layers of a variant, by its name."""

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
from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.baselines import Blocking, MegatronOrder, Sliced, in_order
from commfuse_npu.tools.bench.carriers import (
    Carrier,
    DirectExchange,
    NoTransfers,
    TorchCollectives,
)
from commfuse_npu.tools.bench.shapes import WORKS
from commfuse_npu.tools.bench.variants import Variant
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "TakingTurns", "form_of", "plain_form"]

_Layer = Callable[..., torch.Tensor]


class Fused:
    """This project's ops.  Tuning decisions are not kept between runs."""

    def __init__(self, transport: AnyTransport, variant: Variant) -> None:
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
        """Host seconds spent waiting for transfers since the start; 0 over collectives."""
        return getattr(self._transport, "blocked_seconds", 0.0)

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


def form_of(variant: Variant, transport: Transport, direct: DirectExchange) -> Form:
    """The layers of a variant.  ``communication`` has none, as it computes nothing.

    Args:
        transport: of the fused ops, with a lane per peer; torch's collectives run on its group.
        direct: its group and buffers are shared with the direct exchanges of the baselines.
    """
    if variant.kind == "fused":
        return Fused(transport, variant)
    exchange = DirectExchange(direct.group, direct.idle)
    if variant.kind == "turns":
        return TakingTurns(exchange)
    carrier: Carrier = exchange
    if variant.kind == "compute":
        carrier = NoTransfers(direct.group, {})
    elif not variant.direct:
        carrier = TorchCollectives(transport.group, direct.idle)
    if variant.kind == "sliced":
        return Sliced(carrier, variant.slices)
    return MegatronOrder(carrier) if variant.kind == "megatron" else Blocking(carrier)


def plain_form(variant: Variant, transport: Transport) -> Form:
    """A fused form over collectives, split into the same GEMMs and hence the same additions."""
    return Fused(CollectiveTransport(transport.group, same_pieces=True), variant)
