"""Streams and events of a module that stands in for ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.streams import Event

__all__ = ["DeviceStreams"]


class _Point:
    """An event of the device; whoever waits for it is on the current stream."""

    def __init__(self, module: Any, stream: Any) -> None:
        self._module = module
        self.event = module.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self._module.current_stream().wait_event(self.event)


class DeviceStreams:
    """See :class:`~tests.one_device.streams.Streams`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._streams: dict[Hashable, Any] = {}
        self._second = SecondStream(module, torch.device("cpu"))

    def here(self) -> _Point:
        return _Point(self._module, self._module.current_stream())

    def give(self, stream: Hashable, after: Sequence[Event], work: Callable[[], None]) -> _Point:
        carrier = self._streams.get(stream) or self._module.Stream()
        self._streams[stream] = carrier
        with self._module.stream(carrier):
            for event in after:
                event.wait()
            work()
        return _Point(self._module, carrier)

    def second(self, device: torch.device) -> SecondStream:
        return self._second

    def synchronise(self) -> None:
        self._module.synchronize()
