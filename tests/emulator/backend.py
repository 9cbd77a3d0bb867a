"""Registers the emulated HCCL with torch.distributed, in a process that has a line to a referee.

As torch_npu does, it puts its own ``batch_isend_irecv`` in the place of torch's: one operation on
the group's communicator, and one handle for all transfers.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.emulator.link import Link
from tests.emulator.process_group import HcclGroup

BACKEND = "emulated_hccl"
"""Its name; it is registered as a backend of CPU tensors."""


def register(link: Link, size: int) -> None:
    """Make the backend known to this process, one of ``size``."""

    def create(options: Any, _: object) -> HcclGroup:
        ranks = list(options.global_ranks_in_group) or list(range(size))
        seconds = options.timeout.total_seconds()
        return HcclGroup(link, options.group_id, options.group_rank, ranks, seconds, BACKEND)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    torchs_own = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, HcclGroup):
            return torchs_own(operations)
        dist.distributed_c10d._check_p2p_op_list(operations)
        device = operations[0].tensor.device
        group._start_coalescing(device)
        try:
            for one in operations:
                post = group.send if one.op is dist.isend else group.recv
                post([one.tensor], one.group_peer, one.tag)
        except BaseException:
            group._batch = None
            raise
        return [group._end_coalescing(device)]

    for module in (dist, dist.distributed_c10d):
        module.batch_isend_irecv = batch_isend_irecv
