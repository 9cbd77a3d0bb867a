"""Where and how one call of an op runs, and whether it runs fused at all."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.plan import Kind, Own, Plan, Schedule
from commfuse_npu.runtime.transport import Transport

__all__ = ["Job", "any_grad", "even_chunks", "options_for_rows", "takes_plain_path"]

_logger = logging.getLogger(__name__)
_said: set[str] = set()


@dataclass(frozen=True)
class Job:
    """One call; forward and backward have the same.

    Attributes:
        backward: the schedule of the backward's own collective.
        again: that of a gather which is repeated in the backward, behind other work.
    """

    transport: Transport
    options: LinearOptions
    name: str
    backward: Schedule
    again: Schedule

    @classmethod
    def of(cls, transport: Transport, options: LinearOptions, name: str) -> Job:
        """With one schedule for everything."""
        return cls(transport, options, name, options.schedule, options.schedule)

    def plan(self, kind: Kind, own: Own | None = None, schedule: Schedule | None = None) -> Plan:
        schedule = schedule or self.options.schedule
        return schedule.plan(kind, self.transport.rank, self.transport.size, own)


def options_for_rows(options: LinearOptions, block_rows: int) -> LinearOptions:
    """No more chunks than a block has rows."""
    chunks = min(options.schedule.chunks, max(1, block_rows))
    if chunks == options.schedule.chunks:
        return options
    return replace(options, schedule=replace(options.schedule, chunks=chunks))


def even_chunks(options: LinearOptions) -> LinearOptions:
    """Chunks of one length.

    For attention, which keeps the statistics of each piece of queries for the backward: that runs
    the other way round, and tapered pieces would have other rows.
    """
    return replace(options, schedule=replace(options.schedule, taper=1.0))


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
    transport.agree(name, path="plain", shape=tuple(like.shape), dtype=like.dtype)
    line = f"{name} takes the plain path: {reason}"
    if line not in _said:
        _said.add(line)
        _logger.warning(line)
    return True
