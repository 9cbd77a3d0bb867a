"""From the name of a variant to the layers that a work is made of."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_reduce_scatter,
    plain_all_gather_linear,
    plain_attention_linear_reduce_scatter,
    plain_linear_reduce_scatter,
)
from commfuse_npu.ops.blocked_attention import blocked_attention
from commfuse_npu.runtime.transport import BufferPool, Transport
from commfuse_npu.tools.bench.baselines import (
    Blocking,
    MegatronOrder,
    Sliced,
    column_parallel,
    row_parallel,
)
from commfuse_npu.tools.bench.carriers import Carrier, DirectExchange, NoTransfers, TorchCollectives
from commfuse_npu.tools.bench.variants import Variant
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "Groups", "PlainForm", "form_of", "options_of"]


class Form(Protocol):
    """The three layers that works are made of, differentiable; see :mod:`commfuse_npu.ops`.

    Attributes:
        blocked_seconds: host time spent in waits for transfers since the start.
    """

    @property
    def blocked_seconds(self) -> float: ...

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[s, ..., I] -> [S, ..., O]``."""

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[S, ..., I] -> [s, ..., O]``."""

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """``[S, B, A, D], [S, B, G, D] -> [s, B, O]``, causal."""


class Groups:
    """The process groups of a run, all made and connected at start.

    Attributes:
        transport: of the product, with a lane per peer.
        collectives: the group of torch's collectives.
        direct: the group of the baselines' direct exchanges.
    """

    def __init__(self) -> None:
        size = dist.get_world_size()
        self.transport = Transport.create(lanes=max(1, size - 1))
        self.collectives = self.transport.group
        direct = dist.new_group(list(range(size)))
        assert direct is not None
        self.direct: dist.ProcessGroup = direct
        self.pool = BufferPool()
        for group in (self.collectives, self.direct):
            dist.all_reduce(torch.ones(1, device=self.transport.device_type), group=group)


class _BaselineForm:
    def __init__(self, layers: Blocking) -> None:
        self._layers = layers

    @property
    def blocked_seconds(self) -> float:
        return self._layers.carrier.blocked_seconds

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return column_parallel(self._layers, x, weight)

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row_parallel(self._layers, x, weight)

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        attended = blocked_attention(q, k, v, causal=True).flatten(2)
        return row_parallel(self._layers, attended, weight)


class _FusedForm:
    def __init__(self, transport: Transport, options: LinearOptions) -> None:
        self._transport, self._options = transport, options

    @property
    def blocked_seconds(self) -> float:
        return self._transport.blocked_seconds

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return all_gather_linear(x, weight, transport=self._transport, options=self._options)

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_reduce_scatter(x, weight, transport=self._transport, options=self._options)

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return attention_linear_reduce_scatter(
            q, k, v, weight, transport=self._transport, causal=True, options=self._options
        )


class PlainForm:
    """The product's plain ops, cut into the GEMMs of a fused form: the same additions."""

    blocked_seconds = 0.0

    def __init__(self, group: dist.ProcessGroup, options: LinearOptions) -> None:
        self._group, self._options = group, options

    def all_gather_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain_all_gather_linear(
            x, weight, group=self._group, options=self._options, same_gemms=True
        )

    def linear_reduce_scatter(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain_linear_reduce_scatter(
            x, weight, group=self._group, options=self._options, same_gemms=True
        )

    def attention_linear_reduce_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return plain_attention_linear_reduce_scatter(
            q, k, v, weight, group=self._group, causal=True, options=self._options,
            same_blocks=True,
        )  # fmt: skip


def options_of(variant: Variant) -> LinearOptions:
    """The product's options for a variant of it.  What was found out is not kept between runs."""
    assert variant.schedule is not None
    tuning = Tuning() if variant.tuned else None
    return LinearOptions(variant.schedule, wgrad=variant.wgrad, tuning=tuning)


def form_of(variant: Variant, groups: Groups) -> Form:
    """The layers of a variant.  ``communication`` has none: it computes nothing."""
    if variant.kind == "fused":
        return _FusedForm(groups.transport, options_of(variant))
    if variant.kind == "compute":
        return _BaselineForm(Blocking(NoTransfers(groups.transport.rank, groups.transport.size)))
    carrier: Carrier = (
        DirectExchange(groups.direct, groups.pool)
        if variant.direct
        else TorchCollectives(groups.collectives, groups.pool)
    )
    if variant.kind == "sliced":
        return _BaselineForm(Sliced(carrier, variant.slices))
    return _BaselineForm(
        MegatronOrder(carrier) if variant.kind == "megatron" else Blocking(carrier)
    )
