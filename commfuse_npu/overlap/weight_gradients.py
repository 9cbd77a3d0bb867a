"""Weight gradients that are computed later, while every pass waits for a transfer.

Nothing reads the gradient of a weight before the end of its micro-batch, and its GEMM has no
transfer.  So deferring it changes neither results nor the order of collectives, as long as the
gradients of each weight are added in their order: first in, first out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_npu.overlap.thread_context import ThreadContext, without_modes
from commfuse_npu.plan.turn_rule import MOST_WEIGHT_GRADIENTS

__all__ = ["WeightGradients"]


@dataclass(frozen=True)
class _Waiting:
    """A gradient that waits, with the context of its node and the states of its operands."""

    parameter: torch.Tensor
    accumulate: Callable[..., object]
    operands: tuple[torch.Tensor, ...]
    states: tuple[tuple[int, int], ...]
    context: ThreadContext

    def refuse_changed_operands(self) -> None:
        for operand, (version, size) in zip(self.operands, self.states, strict=True):
            now = _state(operand)
            if now != (version, size):
                raise RuntimeError(
                    f"an operand of shape {tuple(operand.shape)} was "
                    f"{'overwritten' if now[1] == size else 'freed'} before the gradient of its "
                    f"weight of shape {tuple(self.parameter.shape)} was computed; keep it until "
                    "the end of the backward, or set COMMFUSE_OVERLAP=0"
                )


class WeightGradients:
    """Weight gradients that wait, at most ``MOST_WEIGHT_GRADIENTS``.

    Args:
        device: ``npu``, ``cuda`` or ``cpu``.

    Attributes:
        deferred: how many were added since the last :meth:`compute_all`.
        most_bytes: the most bytes that operands of waiting gradients had.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._kind = device
        self._device: Any = None if device == "cpu" else torch.get_device_module(device)
        self._stream = None if self._device is None else self._device.current_stream()
        self._waiting: deque[_Waiting] = deque()
        self.deferred = 0
        self.most_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def in_this_stream(self) -> bool:
        """Whether the current stream is that in which the queue was created.

        Gradients of other streams may not wait: autograd synchronizes streams at the end of a
        backward.
        """
        return self._device is None or bool(self._device.current_stream() == self._stream)

    def add(
        self,
        parameter: torch.Tensor,
        accumulate: Callable[..., object],
        operands: Sequence[torch.Tensor],
    ) -> None:
        """Let a gradient wait; if too many wait already, the oldest one is computed.

        Args:
            accumulate: ``accumulate(parameter, *operands)`` adds the gradient to that of the
                parameter, without any transfer.
            operands: nobody may change them until then.
        """
        if len(self) >= MOST_WEIGHT_GRADIENTS:
            self.compute_one()
        states = tuple(map(_state, operands))
        context = ThreadContext(self._kind)
        self._waiting.append(_Waiting(parameter, accumulate, tuple(operands), states, context))
        self.deferred += 1
        waiting = (operand for one in self._waiting for operand in one.operands)
        self.most_bytes = max(self.most_bytes, sum(operand.nbytes for operand in waiting))

    def compute_one(self) -> None:
        """Compute the oldest gradient, if any, as in the thread that added it.

        Raises:
            RuntimeError: an operand was overwritten or freed; nothing waits any more.
        """
        if not self._waiting:
            return
        waiting = self._waiting.popleft()
        with ExitStack() as stack:
            without_modes(stack)
            waiting.context.enter(stack)
            stack.enter_context(torch.no_grad())
            try:
                waiting.refuse_changed_operands()
                waiting.accumulate(waiting.parameter, *waiting.operands)
            except BaseException:
                self.discard()
                raise

    def compute_those_of(self, parameter: torch.Tensor) -> None:
        """Compute gradients until none of this parameter waits."""
        while any(waiting.parameter is parameter for waiting in self._waiting):
            self.compute_one()

    def compute_all(self) -> None:
        """Compute all that wait."""
        while self._waiting:
            self.compute_one()
        self.deferred = 0

    def discard(self) -> None:
        """Forget all that wait, after an error."""
        self._waiting.clear()
        self.deferred = 0


def _state(operand: torch.Tensor) -> tuple[int, int]:
    """Changes whenever the operand is written in place, or its memory is freed."""
    return operand._version, operand.untyped_storage().nbytes()
