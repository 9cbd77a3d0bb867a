"""What the streams of a device are asked for, in which order; a device that writes it down."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.one_device import device as device_file
from tests.one_device.device import OneDevice
from tests.one_device.device_streams import DeviceStreams
from tests.one_device.process_group import OneDeviceGroup
from tests.one_device.recording import Posted, Recording


class Stream:
    def __init__(self, module: Module, name: str) -> None:
        self._module, self.name = module, name

    def wait_event(self, event: Event) -> None:
        self._module.asked.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, module: Module) -> None:
        self._module, self.name = module, "nothing"

    def record(self, stream: Stream | None = None) -> None:
        self._module.events += 1
        self.name = f"event {self._module.events}"
        name = (stream or self._module.current).name
        self._module.asked.append(f"{name} records {self.name}")


class Module:
    """Stands in for ``torch.cuda``: its own stream is ``main``, the others are numbered."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events = self.streams = 0
        self.current = Stream(self, "main")

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams}")

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _sleep(self, clocks: int) -> None:
        self.asked.append(f"{self.current.name} sleeps for {clocks}")

    def synchronize(self) -> None:
        self.asked.append("the host waits for all")

    def does(self, what: str) -> None:
        self.asked.append(f"{self.current.name} {what}")

    def told(self) -> list[str]:
        """What it was asked for since the last time."""
        told, self.asked = self.asked, []
        return told


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    return module


def test_a_transfer_is_held_from_its_start_and_over_after_its_copies(module: Module) -> None:
    streams = DeviceStreams("cuda")
    over = streams.give(
        "link",
        [streams.here()],
        0.002,
        lambda: module.does("begins"),
        lambda: module.does("ends"),
    )
    over.wait()
    assert module.told() == [
        "main records event 1",
        "stream 1 waits for event 1",
        "stream 1 records event 2",
        "stream 1 begins",
        "stream 2 waits for event 2",
        "stream 2 sleeps for 2000000",
        "stream 2 records event 3",
        "stream 1 waits for event 3",
        "stream 1 ends",
        "stream 1 records event 4",
        "main waits for event 4",
    ]


def test_the_second_stream_is_late_before_its_work(module: Module) -> None:
    streams = DeviceStreams("cuda")
    streams.delay = lambda: 0.003
    second = streams.second(torch.device("cuda", 0))
    assert streams.second(torch.device("cuda", 0)) is second
    second.hold(second.record(aside=False), aside=True)
    second.do(lambda: module.does("works"))
    second.hold(second.record(aside=True), aside=False)
    assert module.told() == [
        "main records event 1",
        "stream 1 waits for event 1",
        "stream 1 sleeps for 3000000",
        "stream 1 works",
        "stream 1 records event 2",
        "main waits for event 2",
    ]


def recorded(*posted: tuple[str, str, int, int]) -> Recording:
    """Of (group, what, tensors sent, tensors received), each of 4 ones."""
    recording = Recording()
    for group, what, sent, received in posted:
        ones = [[torch.ones(4) for _ in range(count)] for count in (sent, received)]
        recording.add(group, Posted(what, *ones))
    return recording


def test_a_link_carries_one_thing_after_the_other_whatever_group_they_are_of(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_file, "_poison", lambda tensor: module.does("poisons"))
    device = OneDevice(DeviceStreams("cuda"))
    lanes = [OneDeviceGroup(device, name, 0, (0, 1, 2), None) for name in "ab"]
    recording = recorded(("a", "receive from 1", 0, 1), ("b", "receive from 1", 0, 1),
                         ("b", "receive from 2", 0, 1))  # fmt: skip
    into = torch.zeros(4)
    with device.replaying(recording, seed=1):
        monkeypatch.setattr(device.streams, "hold", lambda seconds: None)
        for lane, source in ((0, 1), (1, 1), (1, 2)):
            lanes[lane].recv([into], source)
    asked = module.told()
    # What is not received yet is overwritten before the point that the transfer comes after.
    firsts = [at for at, one in enumerate(asked) if one == "main poisons"]
    assert [asked[at + 1] for at in firsts] == [
        "main records event 1",
        "main records event 5",
        "main records event 9",
    ]
    assert "stream 1 records event 4" in asked  # the first transfer is over
    waits = [one for one in asked if "waits for event" in one and one.split(" waits")[0] in
             ("stream 3", "stream 5")]  # fmt: skip
    # The second one on the same link waits for it, the third one on another link does not.
    assert waits == ["stream 3 waits for event 5", "stream 3 waits for event 4",
                     "stream 3 waits for event 7", "stream 5 waits for event 9",
                     "stream 5 waits for event 11"]  # fmt: skip
    assert asked[-1] == "the host waits for all"
    assert torch.equal(into, torch.ones(4))


def test_tensors_live_until_the_transfer_is_waited_for(module: Module) -> None:
    device = OneDevice(DeviceStreams("cuda"))
    group = OneDeviceGroup(device, "a", 0, (0, 1), None)
    with device.replaying(recorded(("a", "send to 1", 1, 0), ("a", "all-reduce", 1, 1))):
        sent, summed = torch.ones(4), torch.ones(4)
        works: Any = [group.send([sent], 1), group.allreduce([summed], None)]
        alive = [weakref.ref(sent), weakref.ref(summed)]
        del sent, summed
        assert None not in [tensor() for tensor in alive]
        for work in works:
            work.wait()
        assert [tensor() for tensor in alive] == [None, None]


def test_what_is_received_in_the_place_of_what_is_sent_is_not_overwritten_before(
    module: Module,
) -> None:
    device = OneDevice(DeviceStreams("cuda"))
    group = OneDeviceGroup(device, "a", 1, (0, 1), None)
    partial = torch.arange(8.0)
    recording = Recording()
    recording.add("a", Posted("reduce-scatter", [partial.clone()], [torch.full((4,), 9.0)]))
    with device.replaying(recording, seed=0):
        group.reduce_scatter_single(partial[4:], partial, None)
    assert partial.tolist() == [0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0, 9.0]
