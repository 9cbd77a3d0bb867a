"""Layers in chunks of the sequence over blocking collectives: the plain form of a flow.

The same parts run on either (:class:`~commfuse_npu.ops.flow.stage.Part`); here one chunk after the
other goes through a whole part, and nothing is under way beside any work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.weight_gradient import WeightGradient
from commfuse_npu.reference.collective_functions import all_gather, reduce_scatter

__all__ = ["PlainFlow", "PlainStage"]


class PlainWeight:
    """A weight, and its gradient: the chunks' products, summed in fp32 from the last to the first.

    Args:
        weight: ``[O, I]``.
        main_grad: see :class:`~commfuse_npu.layers.weight_gradient.WeightGradient`.
    """

    def __init__(self, weight: torch.Tensor, main_grad: bool, chunks: int) -> None:
        self.weight, self._main_grad, self._chunks = weight, main_grad, chunks
        self._gradient: WeightGradient | None = None
        self._added = 0

    def add(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient when all chunks have added to it."""
        if self._gradient is None:
            self._gradient = WeightGradient(self.weight, main_grad=self._main_grad, blocks=True)
        self._gradient.add(grad.flatten(0, -2), x.flatten(0, -2))
        self._added += 1
        return self._gradient.result() if self._added == self._chunks else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, state: PlainWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.state = state
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weight = ctx.state.add(grad, x) if ctx.needs_input_grad[1] else None
        return torch.matmul(grad, weight), grad_weight, None


class PlainFlow:
    """What :class:`~commfuse_npu.ops.flow.transfers.Flow` offers to a part, blocking.

    Args:
        group: the tensor-parallel group.
        chunks: how many runs the sequence is cut into.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: int) -> None:
        self.group, self.chunks = group, chunks

    def weights(self, given: Iterable[tuple[torch.Tensor, bool]]) -> list[PlainWeight]:
        return [PlainWeight(weight, main_grad, self.chunks) for weight, main_grad in given]

    def column(
        self, shard: torch.Tensor, weight: PlainWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``all_gather(shard) @ weight^T + bias``: ``[s / c, B, H]`` to ``[S / c, B, O]``."""
        y = _Linear.apply(all_gather(shard, self.group), weight.weight, weight)
        return y if bias is None else y + bias

    def row(
        self, x: torch.Tensor, weight: PlainWeight, name: str, after: object = None
    ) -> torch.Tensor:
        """``reduce_scatter(x @ weight^T)``: ``[S / c, B, I]`` to ``[s / c, B, H]``."""
        return reduce_scatter(_Linear.apply(x, weight.weight, weight), self.group)


class PlainStage:
    """The plain form of :class:`~commfuse_npu.ops.flow.stage.Stage`.

    Args:
        hidden: ``[s, B, H]``, this rank's stripes; chunks divide ``s``.
    """

    def __init__(self, flow: PlainFlow, hidden: torch.Tensor) -> None:
        self._flow = flow
        self._hidden = list(hidden.split(hidden.shape[0] // flow.chunks))

    def run(self, part: Any, following: object = None) -> None:
        """Run a part, chunk by chunk; see :class:`~commfuse_npu.ops.flow.stage.Part`."""
        weights = self._flow.weights(part.weights)
        for chunk, hidden in enumerate(self._hidden):
            y = part.work(self._flow, part.enter(hidden), weights, chunk)
            self._hidden[chunk] = part.leave(y, hidden)

    def end(self) -> torch.Tensor:
        """The hidden states, whole again: ``[s, B, H]``."""
        return torch.cat(self._hidden)
