"""Registers the backend with torch.distributed, in the process of one rank.

As torch_npu does, it puts its own ``batch_isend_irecv`` in the place of torch's: a batch is one
operation with one handle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from tests.one_device.device import OneDevice
from tests.one_device.late_streams import LateStreams
from tests.one_device.process_group import BACKEND, OneDeviceGroup

__all__ = ["BACKEND", "register"]


@cache
def register() -> OneDevice:
    """Make the backend known to this process; returns what its groups share."""
    device = OneDevice(LateStreams)

    def create(options: Any, _: object) -> OneDeviceGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        together = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return OneDeviceGroup(device, options.group_id, options.group_rank, ranks, together)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    torchs_own = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        dist.distributed_c10d._check_p2p_op_list(operations)  # of one group
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, OneDeviceGroup):
            return list(torchs_own(operations))
        return [group.post_batch(operations)]

    for module in (dist, dist.distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]
    return device
