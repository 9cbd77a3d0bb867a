"""Streams of a CPU: a thread each, in the order of what it was given.

The caller's own stream is the host: an event of it has always happened, and waiting for an event
holds the host.

A stream has a clock of its own, which says when something is over if nothing is late: a thread that
wakes 50 us after its time does not delay what comes next on the link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.streams import Event

__all__ = ["HostSecond", "ThreadStreams"]


class _Done:
    """An event: over at a time, or with an error."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.at = 0.0
        self.error: BaseException | None = None

    def end(self, at: float, error: BaseException | None = None) -> None:
        self.at, self.error = at, error
        self.over.set()

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise RuntimeError(f"a stream failed before: {self.error!r}") from self.error


def _ended(at: float) -> _Done:
    done = _Done()
    done.end(at)
    return done


_Job = tuple[Sequence[_Done], float, float, Callable[[], None], Callable[[], None], _Done]


class _Stream:
    """A thread and what it has still to do; once something of it failed it does nothing more."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self.last = _ended(0.0)
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def give(
        self,
        after: Sequence[_Done],
        seconds: float,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> _Done:
        after, self.last = (self.last, *after), _Done()
        self._jobs.put((after, time.perf_counter(), seconds, begin, end, self.last))
        return self.last

    def finish(self) -> _Done:
        """What it was given last; what it is given from now on does not ask how that ended."""
        self.last.over.wait()
        last, self.last = self.last, _ended(self.last.at)
        return last

    def _work(self) -> None:
        while True:
            after, start, seconds, begin, end, done = self._jobs.get()
            try:
                for event in after:
                    event.over.wait()
                    if event.error is not None:
                        raise event.error
                    start = max(start, event.at)
                over = start + max(seconds, _seconds(begin))
                pause = over - time.perf_counter()
                if pause > 0:
                    time.sleep(pause)
                done.end(over + _seconds(end))
            except BaseException as error:
                # Whoever waits for it gets it.
                done.end(time.perf_counter(), error)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class HostSecond(SecondStream):
    """The second stream of operations, where the host is the first: one more of these streams.

    Args:
        streams: which also say what a stream was given ``last``.
    """

    def __init__(self, streams: Any) -> None:
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

        self._streams.give("second", (), self._streams.delay(), lambda: None, there)

    def record(self, *, aside: bool) -> Event:
        point: Event = self._streams.last("second") if aside else self._streams.here()
        return point

    def hold(self, event: Event, *, aside: bool) -> None:
        if aside:
            self._streams.give("second", (event,), 0.0, lambda: None, lambda: None)
        else:
            event.wait()


class ThreadStreams:
    """See :class:`~tests.one_device.streams.Streams`."""

    def __init__(self) -> None:
        self.delay: Callable[[], float] = lambda: 0.0
        self._streams: dict[Hashable, _Stream] = {}
        self._second = HostSecond(self)

    def here(self) -> _Done:
        return _ended(time.perf_counter())

    def give(
        self,
        stream: Hashable,
        after: Sequence[Event],
        seconds: float,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> _Done:
        return self._of(stream).give(after, seconds, begin, end)  # type: ignore[arg-type]

    def last(self, stream: Hashable) -> _Done:
        """What a stream was given last."""
        return self._of(stream).last

    def second(self, device: torch.device) -> SecondStream:
        return self._second

    def synchronise(self) -> None:
        for last in [stream.finish() for stream in self._streams.values()]:
            last.wait()

    def _of(self, stream: Hashable) -> _Stream:
        if stream not in self._streams:
            self._streams[stream] = _Stream(f"stream {stream}")
        return self._streams[stream]
