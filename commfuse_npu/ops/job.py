"""Where and how one call of an op runs, and whether it runs fused at all."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime.transport import Transport

__all__ = ["Job", "any_grad", "takes_plain_path"]

_logger = logging.getLogger(__name__)
_said: set[str] = set()


class Job(NamedTuple):
    """One call; forward and backward have the same.

    Attributes:
        forward, backward: their schedules; ``None`` for torch's collectives.
    """

    transport: Transport
    options: LinearOptions
    name: str
    forward: Schedule | None
    backward: Schedule | None

    @classmethod
    def of(cls, transport: Transport, options: LinearOptions, name: str) -> Job:
        """With one schedule for both."""
        return cls(transport, options, name, options.schedule, options.schedule)

    def place(self, schedule: Schedule | None = None) -> Place:
        """For whom a program is compiled: this rank, by the options' schedule or another one."""
        return self.transport.place(schedule or self.options.schedule)


def any_grad(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def takes_plain_path(
    name: str, like: torch.Tensor, transport: Transport, *, rows: int, at_least: int = 1
) -> bool:
    """Whether to take the plain path; the ranks agree on it, the reason is logged once.

    Args:
        like: what the call is about: its shape and dtype have to be the same on every rank.
        rows: how many rows there are to split.
        at_least: how many are needed.
    """
    reason = None
    if transport.size == 1:
        reason = "a group of one has nothing to transfer"
    elif rows < at_least:
        reason = f"{rows} rows cannot be split over {transport.size} ranks"
    if reason is None:
        return False
    transport.agree(name, {"shape": tuple(like.shape)}, path="plain", dtype=like.dtype)
    line = f"{name} takes the plain path: {reason}"
    if line not in _said:
        _said.add(line)
        _logger.warning(line)
    return True
