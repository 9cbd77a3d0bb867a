"""For whom a plain form runs, and in which order it adds."""

from __future__ import annotations

import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.schedule import Place

__all__ = ["place_in", "sources_of"]


def place_in(group: dist.ProcessGroup, schedule: Schedule) -> Place:
    """This rank; plain forms take their pieces from the rules that the fused ones run by."""
    return Place(schedule, group.rank(), group.size(), True)


def sources_of(place: Place) -> list[int]:
    """Whose partials the fused form adds, in this order, the own one last."""
    hops = place.schedule.hops(place.rank, place.size, "last")
    return [*(hop.source for hop in hops), place.rank]
