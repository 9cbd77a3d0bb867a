"""From the name of a variant to the layers that a work is made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

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
from commfuse_npu.tools.bench import wire
from commfuse_npu.tools.bench.baselines import Blocking, MegatronOrder, Ring, Sliced, in_order
from commfuse_npu.tools.bench.carriers import (
    Buffers,
    Carrier,
    DirectExchange,
    NoTransfers,
    TorchCollectives,
)
from commfuse_npu.tools.bench.shapes import WORKS
from commfuse_npu.tools.bench.variants import Variant
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "Groups", "TakingTurns"]

_Layer = Callable[..., torch.Tensor]


class Fused:
    """This project's ops.  What tuning finds out is not kept between runs."""

    def __init__(self, transport: AnyTransport, variant: Variant) -> None:
        assert variant.schedule is not None
        tuning = Tuning() if variant.tuned else None
        options = LinearOptions(variant.schedule, wgrad=variant.wgrad, tuning=tuning)
        given: dict[str, Any] = {"transport": transport, "options": options}
        self._transport = transport
        self.all_gather_linear: _Layer = partial(all_gather_linear, **given)
        self.linear_reduce_scatter: _Layer = partial(linear_reduce_scatter, **given)
        self.attention_linear_reduce_scatter: _Layer = partial(
            attention_linear_reduce_scatter, causal=True, **given
        )

    def blocked_seconds(self) -> float:
        """Host time spent in waits for transfers since the start; 0 over collectives."""
        return getattr(self._transport, "blocked_seconds", 0.0)

    pair = staticmethod(in_order)


class TakingTurns(MegatronOrder):
    """Forward-backward overlap: the first step is measured, the others run in the order from it."""

    def __init__(self, carrier: Carrier, group: dist.ProcessGroup) -> None:
        super().__init__(carrier)
        self.overlap = ForwardBackwardOverlap([group], states=())
        self._to_measure = WORKS["micro-batches"].micro_batches - 1

    def pair(self, forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
        if self._to_measure:
            self._to_measure -= 1
            return self.overlap.record(forward, backward)
        if not self.overlap.orders:
            self.overlap.choose_orders()
        return self.overlap.run(forward, backward)


Form = Blocking | Fused
"""The three layers that works are made of, differentiable; see :mod:`commfuse_npu.ops`."""


class Groups:
    """What the forms communicate over, connected at start.

    Args:
        transport: of the product, with a lane per peer; torch's collectives run on its group.

    Attributes:
        direct: direct exchanges, over a group of their own.
        idle: buffers of the baselines.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        group = dist.new_group(list(range(transport.size)))
        assert group is not None
        self._group: dist.ProcessGroup = group
        self.idle: Buffers = {}
        self.direct = DirectExchange(self._group, self.idle)
        for one in (transport.group, self._group):
            dist.all_reduce(torch.ones(1, device=transport.device_type), group=one)

    def pace(self, bytes_per_second: float | None) -> wire.Pacing:
        """Give the sockets of these groups a rate, which are all of this process."""
        return wire.pace(bytes_per_second)

    def form(self, variant: Variant) -> Form:
        """The layers of a variant.  ``communication`` has none: it computes nothing."""
        direct, ours = DirectExchange(self._group, self.idle), self.transport
        carrier = direct if variant.direct else TorchCollectives(ours.group, self.idle)
        made: dict[str, Callable[[], Form]] = {
            "compute": lambda: Blocking(NoTransfers(self._group, {})),
            "blocking": lambda: Blocking(carrier),
            "megatron": lambda: MegatronOrder(carrier),
            "sliced": lambda: Sliced(carrier, variant.slices),
            "ring": lambda: Ring(direct),
            "turns": lambda: TakingTurns(direct, self._group),
            "fused": lambda: Fused(ours, variant),
        }
        return made[variant.kind]()

    def plain_form(self, variant: Variant) -> Form:
        """A fused form by collectives, cut into the same GEMMs: the same additions."""
        return Fused(CollectiveTransport(self.transport.group, same_pieces=True), variant)
