"""From the name of a variant to the layers that a work is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
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
from commfuse_npu.plan import split
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.attention import blocked_attention
from commfuse_npu.tools.bench.baselines import (
    Blocking,
    MegatronOrder,
    Sliced,
    column_parallel,
    row_parallel,
)
from commfuse_npu.tools.bench.carriers import (
    BufferPool,
    Carrier,
    DirectExchange,
    NoTransfers,
    TakingTurns,
    TorchCollectives,
)
from commfuse_npu.tools.bench.ring import Ring
from commfuse_npu.tools.bench.shapes import MICROBATCHES
from commfuse_npu.tools.bench.variants import Variant
from commfuse_npu.tuning import Tuning

__all__ = ["Form", "Groups", "baseline", "form_of", "plain_form"]

_Layer = Callable[..., torch.Tensor]

_RUNS = 8
"""Of queries in the attention of the baselines, as many as eight ranks have blocks."""


_Pair = Callable[[Callable[[], Any], Callable[[], Any]], tuple[Any, Any]]


def _in_order(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
    result = backward()
    return forward(), result


@dataclass(frozen=True)
class Form:
    """The three layers that works are made of, differentiable; see :mod:`commfuse_npu.ops`.

    Attributes:
        all_gather_linear: ``x [s, ..., I], weight -> [S, ..., O]``.
        linear_reduce_scatter: ``x [S, ..., I], weight -> [s, ..., O]``.
        attention_linear_reduce_scatter: ``q [S, B, A, D], k and v [S, B, G, D], weight ->
            [s, B, O]``, causal.
        blocked_seconds: host time spent in waits for transfers since the start.
        pair: runs the forward of a micro-batch and the backward of another one.
    """

    all_gather_linear: _Layer
    linear_reduce_scatter: _Layer
    attention_linear_reduce_scatter: _Layer
    blocked_seconds: Callable[[], float]
    pair: _Pair = _in_order


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


def _options_of(variant: Variant) -> LinearOptions:
    """The product's options for a variant of it.  What was found out is not kept between runs."""
    assert variant.schedule is not None
    tuning = Tuning() if variant.tuned else None
    return LinearOptions(variant.schedule, wgrad=variant.wgrad, tuning=tuning)


def plain_form(variant: Variant, groups: Groups) -> Form:
    """A fused form by collectives, cut into the same GEMMs: the same additions."""
    transport = CollectiveTransport(groups.collectives, same_pieces=True)
    return _ops_on(transport, variant, lambda: 0.0)


def _ops_on(
    transport: AnyTransport, variant: Variant, blocked_seconds: Callable[[], float]
) -> Form:
    options, attend = _options_of(variant), attention_linear_reduce_scatter
    return Form(
        partial(all_gather_linear, transport=transport, options=options),
        partial(linear_reduce_scatter, transport=transport, options=options),
        partial(attend, transport=transport, options=options, causal=True),
        blocked_seconds,
    )


def form_of(variant: Variant, groups: Groups) -> Form:
    """The layers of a variant.  ``communication`` has none: it computes nothing."""
    transport = groups.transport
    if variant.kind == "fused":
        return _ops_on(transport, variant, lambda: transport.blocked_seconds)
    if variant.kind == "compute":
        return baseline(Blocking(NoTransfers(transport.rank, transport.size)))
    if variant.kind == "turns":
        return _taking_turns(groups)
    if variant.kind == "ring":
        return baseline(Ring(DirectExchange(groups.direct, groups.pool)))
    carrier: Carrier = (
        DirectExchange(groups.direct, groups.pool)
        if variant.direct
        else TorchCollectives(groups.collectives, groups.pool)
    )
    if variant.kind == "sliced":
        return baseline(Sliced(carrier, variant.slices))
    return baseline(MegatronOrder(carrier) if variant.kind == "megatron" else Blocking(carrier))


def _taking_turns(groups: Groups) -> Form:
    """The first step is measured, the following ones run in the order chosen from it."""
    overlap = ForwardBackwardOverlap([groups.direct], states=())
    measured = 0

    def pair(forward: Callable[[], Any], backward: Callable[[], Any]) -> tuple[Any, Any]:
        nonlocal measured
        if measured < MICROBATCHES["micro-batches"] - 1:
            measured += 1
            return overlap.record(forward, backward)
        if not overlap.orders:
            overlap.choose_orders()
        return overlap.run(forward, backward)

    carrier = TakingTurns(groups.direct, groups.pool)
    return replace(baseline(MegatronOrder(carrier)), pair=pair)


def baseline(layers: Blocking, runs: int = _RUNS) -> Form:
    """The layers of one of the :mod:`.baselines`.

    Args:
        runs: of queries, an attention kernel each.
    """

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        # What the mask hides is skipped here as in what it is compared with.
        rows = [slice(*run) for run in pairwise(split(q.shape[0], runs))]
        attended = blocked_attention(q, k, v, rows=rows).flatten(2)
        return row_parallel(layers, attended, weight)

    return Form(
        partial(column_parallel, layers),
        partial(row_parallel, layers),
        attention,
        lambda: layers.carrier.blocked_seconds,
    )
