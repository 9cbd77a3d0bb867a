"""What a stream that is a thread does once something on it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.one_device.device import OneDevice
from tests.one_device.recording import Recording
from tests.one_device.thread_streams import ThreadStreams


def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("lost")


def test_nothing_comes_after_what_failed_and_the_host_gets_it_once() -> None:
    streams, done = ThreadStreams(), list[str]()
    streams.give("link", (), 0.0, fail, nothing)
    after = streams.give("link", (), 0.0, lambda: done.append("same stream"), nothing)
    streams.give("other", [after], 0.0, lambda: done.append("other stream"), nothing)
    streams.give("sound", (), 0.0, lambda: done.append("sound"), nothing)
    with pytest.raises(RuntimeError, match=r"a stream failed before: ValueError\('lost'\)"):
        streams.synchronise()
    assert done == ["sound"]
    streams.give("link", (), 0.0, lambda: done.append("anew"), nothing)
    streams.give("other", (), 0.0, nothing, lambda: done.append("anew"))
    streams.synchronise()
    assert done == ["sound", "anew", "anew"]


def test_the_second_stream_hands_an_error_on_to_whoever_waits() -> None:
    streams: Any = ThreadStreams()
    second = streams.second(None)
    second.do(fail)
    second.do(nothing)
    with pytest.raises(RuntimeError, match="lost"):
        second.hold(second.record(aside=True), aside=False)


def test_what_failed_alone_leaves_nothing_under_way() -> None:
    device, done = OneDevice(ThreadStreams()), list[str]()

    def late_then(work: Callable[[], None]) -> None:
        with device.replaying(Recording()):
            device.streams.give("link", (), 0.05, nothing, lambda: done.append("over"))
            work()

    with pytest.raises(ValueError, match="lost"):
        late_then(fail)
    assert done == ["over"]
    late_then(nothing)
    assert done == ["over", "over"]
