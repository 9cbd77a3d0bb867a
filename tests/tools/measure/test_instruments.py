"""Device time is separated from the host time of launches, on a made-up device."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from commfuse_npu.tools.measure import stopwatch, wire
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


# ------------------------------------------------------------------- pacing rates on real sockets

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's option")


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        with client, served:
            yield client, served


def _rate(of: socket.socket) -> int:
    return int.from_bytes(of.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)


def test_only_connected_sockets_get_a_rate_of_more_than_32_bits_and_lose_it_again(
    connection,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socketpair()[0]:
        assert wire.pace(6e9) == ""
        rates = [_rate(end) for end in (*connection, listening)]
    assert rates == [6_000_000_000, 6_000_000_000, wire.UNLIMITED]
    congestion = connection[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert congestion.rstrip(b"\0") == b"reno"
    wire.pace(None)
    assert [_rate(end) for end in connection] == [wire.UNLIMITED] * 2
    connection[0].sendall(b"x")
    assert connection[1].recv(1) == b"x"


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (socket, "TCP_CONGESTION", 9999, "the kernel refuses"),
        (wire, "_SO_MAX_PACING_RATE", socket.SO_RCVLOWAT, "the kernel took a pacing rate of"),
        (sys, "platform", "darwin", "darwin lists no connected TCP socket"),
        (wire, "connected_sockets", list, "linux lists no connected TCP socket"),
    ],
)  # fmt: skip
def test_why_there_is_no_pacing_is_told(connection, monkeypatch, owner, name, value, said) -> None:
    monkeypatch.setattr(owner, name, value)
    assert said in wire.pace(2**40)
