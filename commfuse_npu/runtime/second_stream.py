"""The stream beside the one that an operation is called on: for sums and copies.

On an NPU vector cores add while the cube cores multiply, if they are given the two on different
streams [read in CANN's documentation].  Which instruction is on which stream, and where one waits
for the other, is in the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

__all__ = ["SecondStream", "second_stream"]


class SecondStream:
    """Of one device.

    Args:
        module: the device's: ``torch.npu``, ``torch.cuda``.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device=device)
        # A backward runs in a thread of its own.
        self._here = threading.local()

    @property
    def entered(self) -> bool:
        """Whether what this thread calls now is on it."""
        return getattr(self._here, "entered", False)

    def do(self, work: Callable[..., None], *args: object) -> None:
        """Call ``work`` with it as the current stream."""
        self._here.entered = True
        try:
            with self._module.stream(self._stream):
                work(*args)
        finally:
            self._here.entered = False

    def _of(self, aside: bool) -> Any:
        return self._stream if aside else self._module.current_stream(self._device)

    def record(self, *, aside: bool) -> Any:
        """An event, after what this stream, or the current one, was given so far."""
        event = self._module.Event()
        event.record(self._of(aside))
        return event

    def hold(self, event: Any, *, aside: bool) -> None:
        """What this stream, or the current one, is given from now on comes after the event."""
        self._of(aside).wait_event(event)


@lru_cache(maxsize=16)
def second_stream(device: torch.device) -> SecondStream | None:
    """The one of a device; a CPU has none, there the host does everything in its order."""
    if device.type == "cpu":
        return None
    return SecondStream(torch.get_device_module(device.type), device)
