"""Where and how one call of an op runs, and whether it runs fused at all."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from commfuse_npu.layers.options import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import Rule
from commfuse_npu.runtime.collective_transport import CollectiveRun, CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport

__all__ = ["AnyRun", "AnyTransport", "Job", "any_grad", "transport_for"]

_logger = logging.getLogger(__name__)
_said: set[str] = set()

AnyTransport = Transport | CollectiveTransport
"""What an op runs on: lanes, or the collectives of torch.distributed."""

AnyRun = Running | CollectiveRun
"""An operation under way on either."""


class Job(NamedTuple):
    """One call; forward and backward have the same.

    Attributes:
        forward, backward: their schedules; ``None`` for torch's collectives and whole GEMMs.
    """

    transport: AnyTransport
    options: LinearOptions
    name: str
    forward: Schedule | None
    backward: Schedule | None

    @classmethod
    def of(cls, transport: AnyTransport, options: LinearOptions, name: str) -> Job:
        """With one schedule for both."""
        return cls(transport, options, name, options.schedule, options.schedule)

    def begin(
        self,
        rule: Rule,
        *arguments: Any,
        like: torch.Tensor,
        backward: bool = False,
        sum_dtype: torch.dtype | None = None,
    ) -> AnyRun:
        """Begin the operation of a rule.

        Args:
            like: of the dtype and on the device of what is transferred.
            sum_dtype: in which partials are added, by default their own.
        """
        schedule, name = self.forward, self.name
        if backward:
            schedule, name = self.backward, f"{self.name} backward"
        carrier: Any = self.transport if schedule else self.transport.by_collectives
        program = carrier.program(rule, schedule or self.options.schedule, *arguments)
        running: AnyRun = carrier.begin(program, name, like, self.options, sum_dtype)
        return running


def any_grad(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def transport_for(
    name: str, like: torch.Tensor, transport: AnyTransport, *, rows: int, at_least: int = 1
) -> AnyTransport:
    """The transport, or its collectives where nothing can be split; the ranks agree on it.

    The reason is logged once.

    Args:
        like: what the call is about: its shape and dtype have to be the same on every rank.
        rows: how many rows there are to split.
        at_least: how many are needed.
    """
    if transport.size == 1:
        reason = "a group of one has nothing to transfer"
    elif rows < at_least:
        reason = f"{rows} rows cannot be split over {transport.size} ranks"
    else:
        return transport
    transport.agree(name, {"shape": tuple(like.shape)}, path="plain", dtype=like.dtype)
    line = f"{name} takes the plain path: {reason}"
    if line not in _said:
        _said.add(line)
        _logger.warning(line)
    return transport.by_collectives
