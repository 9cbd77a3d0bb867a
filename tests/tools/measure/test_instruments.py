"""Device time is separated from the host time of launches, on a made-up device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from commfuse_npu.tools.measure import stopwatch
from commfuse_npu.tools.measure.stopwatch import Stopwatch


class Device:
    """One stream: work begins when it is launched and earlier work has ended."""

    def __init__(self) -> None:
        self.host = self.busy = 0.0
        self.met = list[str]()

    def launch(self, host: float, seconds: float) -> None:
        self.host += host
        self.busy = max(self.busy, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy)

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.device.busy, self.device.host)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    created = Device()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: created.host)
    return created


def of(device: Device, module: Any) -> Stopwatch:
    def ahead() -> None:
        device.launch(1e-5, 1e-4)

    meet, barrier = (partial(device.met.append, who) for who in ("devices", "hosts"))
    return Stopwatch(module, ahead=ahead, meet=meet, barrier=barrier)


def work(device: Device) -> Callable[[Callable[[], None]], None]:
    first = [1.0]  # the first call takes long to launch (loading, compiling)

    def call(lap: Callable[[], None]) -> None:
        device.launch(first.pop() if first else 5e-5, 1e-6)
        for _ in range(6):
            device.launch(5e-5, 1e-6)
        lap()
        device.launch(1e-5, 3e-4)
        lap()

    return call


def test_launches_are_not_in_the_time_of_a_device(device: Device) -> None:
    assert of(device, device).laps(work(device), 3) == [pytest.approx([7e-6, 3e-4])] * 3
    assert device.met == ["hosts", "devices"] * 3


def test_on_a_cpu_it_is_wall_time(device: Device) -> None:
    assert of(device, None).laps(work(device), 2) == [pytest.approx([7 * 5e-5, 1e-5])] * 2
    assert device.met == ["hosts"] * 2
