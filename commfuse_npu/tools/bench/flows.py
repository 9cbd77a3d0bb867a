"""Layers in chunks that flow (:mod:`commfuse_npu.ops.flow`), as a form of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from commfuse_npu.ops.flow import Flow, Part, Stage, stripe, unstripe
from commfuse_npu.reference.flow import PlainFlow, PlainStage
from commfuse_npu.runtime.collectives import Begun, all_gather_rows
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.carriers import Carrier, Pending

__all__ = ["CarriedFlow", "FlowForm", "flow_form", "plain_flow_form"]


@dataclass(frozen=True)
class FlowForm:
    """How whole layers are run chunk by chunk.

    Attributes:
        transport: of the ranks.
        chunks: how many.
        run: ``hidden [s, B, H], parts -> [s, B, H]``, both of this rank's stripes.
        blocked_seconds: host time spent in waits for transfers since the start.
    """

    transport: Transport
    chunks: int
    run: Callable[[torch.Tensor, Sequence[Part]], torch.Tensor]
    blocked_seconds: Callable[[], float]

    def stripes(self, rows: torch.Tensor) -> torch.Tensor:
        """From this rank's run of the sequence to its stripes; all ranks together."""
        return self._exchanged(rows, stripe)

    def in_order(self, stripes: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`stripes`."""
        return self._exchanged(stripes, unstripe)

    def _exchanged(
        self, mine: torch.Tensor, order: Callable[[torch.Tensor, int, int], torch.Tensor]
    ) -> torch.Tensor:
        rank, size = self.transport.rank, self.transport.size
        whole = order(all_gather_rows(mine, self.transport.group), size, self.chunks)
        return whole.chunk(size)[rank].clone()


class CarriedFlow(Flow):
    """A flow over a carrier in place of the group's collectives: on the wire what others have."""

    def __init__(self, transport: Transport, chunks: int, carrier: Carrier) -> None:
        super().__init__(transport, chunks)
        self._carrier = carrier

    def all_gather(self, shard: torch.Tensor) -> Begun:
        pending = self._carrier.gather(shard)
        return pending.result, _Work(pending)

    def reduce_scatter(self, full: torch.Tensor) -> Begun:
        out = full.new_empty((full.shape[0] // self.transport.size, *full.shape[1:]))
        return out, _Work(self._carrier.scatter(full, out))


class _Work:
    """What a transport waits for; the limit is that of the round."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self, limit: timedelta | None = None) -> None:
        self._pending.wait()


def flow_form(flow: Flow, blocked_seconds: Callable[[], float]) -> FlowForm:
    """Layers through :class:`~commfuse_npu.ops.flow.Stage`, all in one."""

    def run(hidden: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        stage = Stage(flow, hidden, parts[0])
        for part, following in zip(parts, (*parts[1:], None), strict=True):
            stage.run(part, following)
        return stage.end()

    return FlowForm(flow.transport, flow.chunks, run, blocked_seconds)


def plain_flow_form(transport: Transport, chunks: int) -> FlowForm:
    """The same chunks over blocking collectives: the same additions."""

    def run(hidden: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        stage = PlainStage(PlainFlow(transport.group, chunks), hidden)
        for part in parts:
            stage.run(part)
        return stage.end()

    return FlowForm(transport, chunks, run, lambda: 0.0)
