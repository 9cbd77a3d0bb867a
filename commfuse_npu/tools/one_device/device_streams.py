"""Streams and events of CUDA (read, not run).

A stream is held by a kernel of one thread that counts clocks, on a stream beside it, so that the
copies of a transfer are part of its time.  The clock's rate is measured once, by the first one that
is held: when a process starts, those of the other ranks use the device as well.  Where GEMMs draw
so much power that the device lowers its clock, what is held beside them is held longer than it was
asked to be; nothing that is timed says so.

The streams of transfers come first: a block of theirs takes the next place that becomes free, where
else it would wait until a GEMM that was given before has started its last block [read].  It takes
that place from the GEMM, and copies within a device may be kernels, too: a link costs a GEMM here
what one beside a device would not.

A process has 8 queues to a device unless ``CUDA_DEVICE_MAX_CONNECTIONS`` says more, 32 at most, and
streams of one queue wait for each other: set it before CUDA starts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from commfuse_npu.tools.one_device.streams import Event

__all__ = ["DeviceStreams"]

_CALIBRATION_CLOCKS = 50_000_000
_MOST_STREAMS = 15
"""Two each of 32 queues; of the other two one is the current stream's, one the second one's of
operations.  torch has 32 streams of a priority and gives them out anew after that [read]."""

_FIRST = -1
"""The priority of what comes before the rest."""


class _Point:
    """An event of the device; whoever waits for it is on the current stream."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self.event = module.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self._module.current_stream().wait_event(self.event)


class _HeldSecond(SecondStream):
    """The second stream of operations, late if it is to be."""

    def __init__(self, module: Any, device: torch.device, streams: DeviceStreams) -> None:
        super().__init__(module, device)
        self._streams = streams

    def do(self, work: Callable[..., None], *args: object) -> None:
        def late() -> None:
            self._streams.hold(self._streams.delay())
            work(*args)

        super().do(late)


class DeviceStreams:
    """See :class:`~commfuse_npu.tools.one_device.streams.Streams`.

    Args:
        device_type: ``cuda``.
    """

    def __init__(self, device_type: str) -> None:
        self.delay: Callable[[], float] = lambda: 0.0
        self._module: Any = torch.get_device_module(device_type)
        self._streams: dict[Hashable, tuple[Any, Any]] = {}
        self._seconds: dict[torch.device, _HeldSecond] = {}

    def here(self) -> _Point:
        return _Point(self._module, self._module.current_stream())

    def give(
        self,
        stream: Hashable,
        after: Sequence[Event],
        seconds: float,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> _Point:
        if stream not in self._streams:
            if len(self._streams) == _MOST_STREAMS:
                raise ValueError(
                    f"{stream} would be stream {_MOST_STREAMS + 1} of transfers; a process "
                    f"has queues for {_MOST_STREAMS}. Take fewer ranks, or fewer lanes"
                )
            self._streams[stream] = (
                self._module.Stream(priority=_FIRST),
                self._module.Stream(priority=_FIRST),
            )
        carrier, clock = self._streams[stream]
        with self._module.stream(carrier):
            for event in after:
                event.wait()
            start = self._module.Event()
            start.record(carrier)
            begin()
        with self._module.stream(clock):
            clock.wait_event(start)
            self.hold(seconds)
        with self._module.stream(carrier):
            over = _Point(self._module, clock)
            over.wait()
            end()
        return _Point(self._module, carrier)

    def hold(self, seconds: float) -> None:
        """Hold the current stream."""
        if seconds > 0:
            self._module._sleep(int(seconds * self._clocks_per_second))

    def second(self, device: torch.device) -> SecondStream:
        if device not in self._seconds:
            self._seconds[device] = _HeldSecond(self._module, device, self)
        return self._seconds[device]

    def synchronise(self) -> None:
        self._module.synchronize()

    @cached_property
    def _clocks_per_second(self) -> float:
        """Of the second time."""
        rate = 0.0
        for _ in range(2):
            start, end = (self._module.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._module._sleep(_CALIBRATION_CLOCKS)
            end.record()
            end.synchronize()
            rate = _CALIBRATION_CLOCKS / (start.elapsed_time(end) / 1e3)
        return rate
