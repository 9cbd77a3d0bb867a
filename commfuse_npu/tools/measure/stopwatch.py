"""Measures seconds of calls, excluding the host time to launch them.

The simulator counts launches separately; in the time of a GEMM or a transfer they would count
twice.  On a device, events are recorded around the call, after other work that lasts longer than
the host needs to launch everything, so the device never waits for the host.  On a CPU, where the
host does the work, it is wall time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Call = Callable[[Callable[[], None]], object]
"""A timed function; its argument ends a lap and starts the next one."""

_LONGER = 2.0
"""Duration of the preceding work, relative to the time from launch to end of a call."""
_PROBES = 8


@dataclass
class Stopwatch:
    """Times calls on one rank.

    Attributes:
        module: the device's module, ``torch.npu``; ``None`` for a CPU.
        ahead: launches some work on the device.
        meet: a collective of all ranks, after which their devices start together.
        barrier: the same for their hosts.
    """

    module: Any
    ahead: Callable[[], object]
    meet: Callable[[], object]
    barrier: Callable[[], object]
    _piece: float | None = None

    def laps(self, call: Call, calls: int) -> list[list[float]]:
        """Seconds of each lap, for each of ``calls`` calls, which all ranks start together.

        Warm-up calls are not included: the first one makes connections and loads code.
        """
        self._seconds(call)
        pieces = 0
        if self.module is not None:
            if self._piece is None:
                self._seconds(lambda lap: self.ahead())
                self._piece = self._seconds(lambda lap: [self.ahead() for _ in range(_PROBES)])
                self._piece /= _PROBES
            pieces = math.ceil(_LONGER * self._seconds(call) / self._piece)
        return [self._laps(call, pieces) for _ in range(calls)]

    def times(self, call: Callable[[], object], calls: int) -> list[float]:
        """:meth:`laps` of a call that is one lap."""

        def once(lap: Callable[[], None]) -> None:
            call()
            lap()

        return [seconds for (seconds,) in self.laps(once, calls)]

    def now(self) -> float:
        """Seconds of a steady clock, once the device is idle."""
        if self.module is not None:
            self.module.synchronize()
        return time.perf_counter()

    def together(self) -> float:
        """Wait until all ranks are here and their devices are idle; returns :meth:`now`."""
        self.now()
        self.barrier()
        return self.now()

    def _seconds(self, call: Call) -> float:
        """Host seconds until the device is done."""
        start = self.now()
        call(lambda: None)
        return self.now() - start

    def _laps(self, call: Call, pieces: int) -> list[float]:
        self.together()
        for _ in range(pieces):
            self.ahead()
        if pieces:
            self.meet()
        marks = [self._mark()]
        call(lambda: marks.append(self._mark()))
        self.now()
        if self.module is None:
            return [after - before for before, after in pairwise(marks)]
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def _mark(self) -> Any:
        if self.module is None:
            return time.perf_counter()
        event = self.module.Event(enable_timing=True)
        event.record()
        return event
