"""The most memory that a call has at once, beyond what there was before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes"]


def peak_bytes(call: Callable[[], object], device_type: str) -> int:
    """Allocations of torch, results included; on a device those of its caching allocator."""
    if device_type != "cpu":
        # Read, not run: torch.npu has the memory functions of torch.cuda.
        device = getattr(torch, device_type)
        device.synchronize()
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        call()
        device.synchronize()
        return int(device.max_memory_allocated()) - int(before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    del result
    # Of each allocation, and, negative, of each tensor that is freed.
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    peak = max(accumulate(changes, initial=0))
    # It is part of a cycle, and torch 2.13 dies of freeing it after another profile was made.
    recorded.profiler.kineto_results = None
    return peak
