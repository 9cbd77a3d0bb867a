"""Collectives of torch.distributed under the names of torch 2.7 and 2.13; the device of a backend.

torch 2.13 calls them ``all_gather_single`` and ``reduce_scatter_single`` and warns about the names
of torch 2.7, which MindSpeed uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

__all__ = [
    "Begun",
    "all_gather_rows",
    "all_to_all",
    "all_to_all_rows",
    "begin_all_gather",
    "begin_all_to_all",
    "begin_reduce_scatter",
    "device_backend",
    "reduce_scatter_rows",
    "sum_rows_in_order",
]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_all_to_all = dist.all_to_all_single
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Begun = tuple[torch.Tensor, Any]
"""The result of an asynchronous collective, and the ``Work`` to wait for before it is read."""


def begin_all_gather(
    shard: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor | None = None
) -> Begun:
    """:func:`all_gather_rows`, asynchronous."""
    if out is None:
        out = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    return out, _all_gather(out, shard.contiguous(), group=group, async_op=True)


def begin_reduce_scatter(full: torch.Tensor, group: dist.ProcessGroup) -> Begun:
    """:func:`reduce_scatter_rows`, asynchronous; ``full`` must not change before it is complete."""
    out = full.new_empty((full.shape[0] // group.size(), *full.shape[1:]))
    return out, _reduce_scatter(out, full.contiguous(), group=group, async_op=True)


def begin_all_to_all(
    blocks: torch.Tensor, group: dist.ProcessGroup, out: torch.Tensor, own: bool = True
) -> Begun:
    """:func:`all_to_all_rows`, asynchronous; ``own=False``: without this rank's own block."""
    splits = None
    if not own:
        rows = blocks.shape[0] // (group.size() - 1)
        rank = group.rank()
        splits = [0 if peer == rank else rows for peer in range(group.size())]
    return out, _all_to_all(out, blocks, splits, splits, group=group, async_op=True)


def all_gather_rows(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[s, ...]`` of every rank of the group, stacked in rank order to ``[n * s, ...]``."""
    out = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    _all_gather(out, shard.contiguous(), group=group)
    return out


def reduce_scatter_rows(full: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum ``[n * s, ...]`` over the ranks of the group; each rank keeps its block ``[s, ...]``.

    On gloo rank r adds ``x[r-1], x[r-2], ..., x[r+1], x[r]`` and rounds at every addition.  gloo
    cuts the tensor into segments of equal length, at least two per rank and at most 1 MiB each, and
    the order depends on the segment.  If a block is not a whole number of segments, a few elements
    at its boundary are added in the order of a neighboring block.  Blocks with an even number of
    elements are whole up to 2 MiB (measured on CPU with 3 and 4 ranks).
    """
    out = full.new_empty((full.shape[0] // group.size(), *full.shape[1:]))
    _reduce_scatter(out, full.contiguous(), group=group)
    return out


def all_to_all_rows(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``[n * s, ...]``: block d goes to rank d of the group; rank r's block arrives as block r."""
    blocks = blocks.contiguous()
    out = torch.empty_like(blocks)
    _all_to_all(out, blocks, group=group)
    return out


def sum_rows_in_order(
    full: torch.Tensor, group: dist.ProcessGroup, sources: Sequence[int]
) -> torch.Tensor:
    """:func:`reduce_scatter_rows`, added in the order of ``sources`` and rounded at every addition.

    Args:
        sources: all ranks of the group, in the order of the additions.
    """
    blocks = all_to_all_rows(full, group).unflatten(0, (group.size(), -1))
    total = blocks[sources[0]].clone()
    for source in sources[1:]:
        total += blocks[source]
    return total


def device_backend(group: dist.ProcessGroup) -> tuple[str, str]:
    """``(device type, name)`` of a group's backend; of ``cpu:gloo,npu:hccl`` that of the device.

    The device type is the first that the backend was registered with.  gloo also takes CUDA
    tensors, through the host; its device type is ``cpu``.

    Raises:
        ValueError: torch.distributed does not know the backend.
    """
    backend: str = dist.get_backend(group)
    if backend == "undefined":  # the world was initialized without one: torch chose by the devices
        backend = dist.get_backend_config(group)
    backends = []
    for part in backend.split(","):
        device, _, name = part.strip().rpartition(":")
        devices = [device] if device else dist.Backend.backend_capability.get(name, [])
        if not devices:
            names = ", ".join(sorted(dist.Backend.backend_capability))
            raise ValueError(
                f"backend {backend!r} is unknown to torch.distributed, which has {names}; make the "
                "group with hccl or gloo"
            )
        backends.append((devices[0], name))
    return next((pair for pair in backends if pair[0] != "cpu"), backends[0])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all_rows(blocks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all_rows(grad, ctx.group), None


def all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """:func:`all_to_all_rows`, differentiable: the backward is another all-to-all."""
    result: torch.Tensor = _AllToAll.apply(blocks, group)
    return result
