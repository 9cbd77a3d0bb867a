"""Device time is separated from the host time of launches, on a made-up device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commfuse_npu.tools.measure import stopwatch
from commfuse_npu.tools.measure.stopwatch import Stopwatch


class Device:
    """One stream: work begins when it is launched and earlier work has ended."""

    def __init__(self) -> None:
        self.host = self.busy = 0.0
        self.met = 0

    def launch(self, host: float, seconds: float) -> None:
        self.host += host
        self.busy = max(self.busy, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy)

    def meet(self) -> None:
        self.met += 1

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

    return Stopwatch(module, ahead=ahead, meet=device.meet, barrier=device.synchronize)


def work(device: Device) -> Callable[[Callable[[], None]], None]:
    def call(lap: Callable[[], None]) -> None:
        for _ in range(7):
            device.launch(5e-5, 1e-6)
        lap()
        device.launch(1e-5, 3e-4)
        lap()

    return call


def test_launches_are_not_in_the_time_of_a_device(device: Device) -> None:
    laps = of(device, device).laps(work(device), 3, together=True)
    assert laps == [pytest.approx([7e-6, 3e-4])] * 3
    assert device.met == 3


def test_work_is_launched_ahead_also_of_the_first_one(device: Device) -> None:
    # The first call takes long to launch (loading, compiling), the others do not.
    first = [1.0]

    def call(lap: Callable[[], None]) -> None:
        device.launch(first.pop() if first else 1e-5, 2e-5)
        lap()

    assert of(device, device).laps(call, 2) == [pytest.approx([2e-5])] * 2
    assert device.met == 0


def test_on_a_cpu_it_is_wall_time(device: Device) -> None:
    laps = of(device, None).laps(work(device), 2, together=True)
    assert laps == [pytest.approx([7 * 5e-5, 1e-5])] * 2
    assert device.met == 0
