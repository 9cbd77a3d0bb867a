"""Streams that do nothing before somebody waits for it: as late as the events allow, every time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.streams import Event
from tests.one_device.thread_streams import HostSecond


class _Late:
    """What a stream has to do, and the point when it is done."""

    def __init__(self, put_off: deque[_Late], work: Callable[[], None]) -> None:
        self._put_off, self._work = put_off, work
        self.over = False

    def wait(self) -> None:
        while not self.over:
            first = self._put_off.popleft()
            first._work()
            first.over = True


class LateStreams:
    """See :class:`~tests.one_device.streams.Streams`; there is no time in it."""

    def __init__(self) -> None:
        self.delay: Callable[[], float] = lambda: 0.0
        self.put_off: defaultdict[Hashable, deque[_Late]] = defaultdict(deque)
        self._last: dict[Hashable, _Late] = {}
        self._second = HostSecond(self)

    def here(self) -> _Late:
        # The caller's stream is the host: what it was given is done.
        now = _Late(deque(), lambda: None)
        now.over = True
        return now

    def give(
        self,
        stream: Hashable,
        after: Sequence[Event],
        seconds: float,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> _Late:
        def work() -> None:
            for event in after:
                event.wait()
            begin()
            end()

        self._last[stream] = _Late(self.put_off[stream], work)
        self.put_off[stream].append(self._last[stream])
        return self._last[stream]

    def last(self, stream: Hashable) -> _Late:
        return self._last.get(stream) or self.here()

    def second(self, device: torch.device) -> SecondStream:
        return self._second

    def synchronise(self) -> None:
        for late in list(self._last.values()):
            late.wait()
