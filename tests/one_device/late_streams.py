"""Streams that do nothing before somebody waits for it: as late as the events allow, every time."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.streams import Event


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


class _Second(SecondStream):
    """The second stream of operations, where the host is the first: one more of these streams."""

    def __init__(self, streams: LateStreams) -> None:
        self._streams = streams
        self._here = threading.local()

    def do(self, work: Callable[..., None], *args: object) -> None:
        def there() -> None:
            self._here.entered = True
            try:
                # Whatever the mode of the caller is: nothing on this stream is differentiated.
                with torch.inference_mode():
                    work(*args)
            finally:
                self._here.entered = False

        self._streams.give("second", (), there)

    def record(self, *, aside: bool) -> Event:
        return self._streams.last("second") if aside else self._streams.here()

    def hold(self, event: Event, *, aside: bool) -> None:
        if aside:
            self._streams.give("second", (event,), lambda: None)
        else:
            event.wait()


class LateStreams:
    """See :class:`~tests.one_device.streams.Streams`."""

    def __init__(self) -> None:
        self._put_off: defaultdict[Hashable, deque[_Late]] = defaultdict(deque)
        self._last: dict[Hashable, _Late] = {}
        self._second = _Second(self)

    def here(self) -> _Late:
        # The caller's stream is the host: what it was given is done.
        now = _Late(deque(), lambda: None)
        now.over = True
        return now

    def give(self, stream: Hashable, after: Sequence[Event], work: Callable[[], None]) -> _Late:
        def late() -> None:
            for event in after:
                event.wait()
            work()

        self._last[stream] = _Late(self._put_off[stream], late)
        self._put_off[stream].append(self._last[stream])
        return self._last[stream]

    def last(self, stream: Hashable) -> _Late:
        """What a stream was given last."""
        return self._last.get(stream) or self.here()

    def second(self, device: torch.device) -> SecondStream:
        return self._second

    def synchronise(self) -> None:
        for late in list(self._last.values()):
            late.wait()
