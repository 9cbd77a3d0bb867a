"""The time, after the device has done what was asked of it."""

from __future__ import annotations

import time

import torch

__all__ = ["now", "synchronise"]


def synchronise(device_type: str) -> None:
    """Wait until the device is idle; a CPU always is when it gets here.

    On an NPU (``torch.npu``) this was read, not run.
    """
    if device_type != "cpu":
        getattr(torch, device_type).synchronize()


def now(device_type: str) -> float:
    """Seconds of a steady clock, with nothing under way on the device."""
    synchronise(device_type)
    return time.perf_counter()
