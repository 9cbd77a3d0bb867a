"""Seconds of what is called, without those that the host takes to launch it.

The simulator counts launches by themselves: in the time of a GEMM or of a transfer they would count
twice.  On a device events are recorded around what is called, behind other work that takes longer
than the host needs to launch all of it, so that nothing waits for the host.  On a CPU, where the
host does the work, it is wall time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

__all__ = ["Call", "Stopwatch"]

Call = Callable[[Callable[[], None]], object]
"""What is timed; it is given what ends a lap and begins the next one."""

_LONGER = 2.0
"""How many times as long as a call from its launch to its end the work before it takes."""
_PROBES = 8


class Stopwatch:
    """Of one rank.

    Args:
        module: the device's, ``torch.npu`` or ``torch.cuda``; ``None`` for a CPU.
        ahead: launches some work of the device.
        meet: a collective of all ranks: behind it they begin together.
        barrier: the same for their hosts.
    """

    def __init__(
        self,
        module: Any,
        *,
        ahead: Callable[[], object],
        meet: Callable[[], object],
        barrier: Callable[[], object],
    ) -> None:
        self._module = module
        self._ahead, self._meet, self._barrier = ahead, meet, barrier
        self._piece: float | None = None

    def synchronise(self) -> None:
        if self._module is not None:
            self._module.synchronize()

    def laps(self, call: Call, calls: int, *, together: bool = False) -> list[list[float]]:
        """Seconds of each lap, of each of so many calls.

        What comes before them, which makes connections and reads code, is none of them.

        Args:
            together: all ranks begin at once.
        """
        self._seconds(call)
        if self._module is None:
            return [self._on_host(call, together) for _ in range(calls)]
        if self._piece is None:
            self._seconds(lambda lap: self._ahead())
            self._piece = self._seconds(lambda lap: [self._ahead() for _ in range(_PROBES)])
            self._piece /= _PROBES
        pieces = math.ceil(_LONGER * self._seconds(call) / self._piece)
        return [self._on_device(call, together, pieces) for _ in range(calls)]

    def _seconds(self, call: Call) -> float:
        """Of the host, until the device is done."""
        self.synchronise()
        start = time.perf_counter()
        call(lambda: None)
        self.synchronise()
        return time.perf_counter() - start

    def _on_host(self, call: Call, together: bool) -> list[float]:
        if together:
            self._barrier()
        marks = [time.perf_counter()]
        call(lambda: marks.append(time.perf_counter()))
        return [after - before for before, after in pairwise(marks)]

    def _on_device(self, call: Call, together: bool, pieces: int) -> list[float]:
        if together:
            self._barrier()
        for _ in range(pieces):
            self._ahead()
        if together:
            self._meet()
        marks = [self._mark()]
        call(lambda: marks.append(self._mark()))
        self.synchronise()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def _mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event
