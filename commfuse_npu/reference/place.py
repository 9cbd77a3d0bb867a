"""For whom a plain form runs."""

from __future__ import annotations

import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.schedule import Place

__all__ = ["place_in"]


def place_in(group: dist.ProcessGroup, schedule: Schedule) -> Place:
    """This rank; plain forms take their pieces from the rules that the fused ones run by."""
    return Place(schedule, group.rank(), group.size(), True)
