"""What a side takes between its places to hand over, measured while it runs by itself."""

from __future__ import annotations

import time
from typing import Any

import torch

from commfuse_npu.overlap.turns import Turns
from commfuse_npu.plan.turn_order import Place

__all__ = ["Recording"]


class Recording(Turns):
    """Runs one side from its beginning to its end, and waits for each transfer where it begins.

    Seconds are the device's, by events on its current stream; on a CPU those of the clock.
    """

    def __init__(self, side: int, device: str) -> None:
        super().__init__()
        self.side = side
        self._events = None if device == "cpu" else torch.get_device_module(device)
        self._measured: list[tuple[Any, Any, Any, int | None, bool]] = []
        self._under_way: list[Any] = []
        self._resumed = self._now()

    def began(self, work: Any, blocking: bool) -> None:
        began = self._now()
        work.wait()
        waits = len(self._under_way) if blocking else None
        self._measured.append((self._resumed, began, self._now(), waits, blocking))
        if not blocking:
            self._under_way.append(work)
        self._passed()

    def waits(self, by_default: bool, work: Any = None) -> None:
        now, waits = self._now(), None
        if work in self._under_way:
            waits = self._under_way.index(work)
            del self._under_way[waits]
        self._measured.append((self._resumed, now, now, waits, by_default))
        self._passed()

    def places(self) -> list[Place]:
        """Those that were passed, and the end of the side, which is now."""
        end = self._now()
        if self._events is not None:
            self._events.synchronize()  # the event's own wait would be a place
        return [
            Place(self._seconds(resumed, began), self._seconds(began, arrived), waits, by_default)
            for resumed, began, arrived, waits, by_default in [
                *self._measured,
                (self._resumed, end, end, None, False),
            ]
        ]

    def _passed(self) -> None:
        self._resumed = self._now()

    def _now(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if start is end:
            return 0.0
        return end - start if self._events is None else float(start.elapsed_time(end)) / 1e3
