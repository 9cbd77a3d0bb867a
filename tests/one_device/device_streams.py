"""Streams and events as CUDA and NPUs have them, of a module that stands in for ``torch.cuda``.

A stream is held by a kernel of one thread, on a stream beside it, so that the copies of a transfer
are part of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.streams import Event

__all__ = ["DeviceStreams"]

_CLOCKS_PER_SECOND = 1e9


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
    """See :class:`~tests.one_device.streams.Streams`.

    Args:
        device_type: whose module is taken.
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
            self._streams[stream] = self._module.Stream(), self._module.Stream()
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
            self._module._sleep(int(seconds * _CLOCKS_PER_SECOND))

    def second(self, device: torch.device) -> SecondStream:
        if device not in self._seconds:
            self._seconds[device] = _HeldSecond(self._module, device, self)
        return self._seconds[device]

    def synchronise(self) -> None:
        self._module.synchronize()
