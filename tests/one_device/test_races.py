"""What runs alone on streams of a device is ordered by events alone: emulated, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from commfuse_npu.ops import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.one_device import process_group
from tests.one_device.backend import register
from tests.one_device.device import OneDevice
from tests.one_device.device_streams import DeviceStreams
from tests.one_device.layers import layers
from tests.one_device.process_group import OneDeviceGroup
from tests.one_device.race_detector import Module, RaceDetector
from tests.one_device.recording import Posted, Recording
from tests.one_device.test_faults import Code, missing_event, sound

Fault = Callable[[pytest.MonkeyPatch], None]


def no_fault(patch: pytest.MonkeyPatch) -> None:
    pass


def the_posting_stream_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    here = DeviceStreams.here
    patch.setattr(DeviceStreams, "here", lambda self: _after_nothing(here(self)))


def the_transfer_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    give = DeviceStreams.give
    patch.setattr(DeviceStreams, "give", lambda self, *args: _after_nothing(give(self, *args)))


def _after_nothing(point: Any) -> Any:
    point.event.clock.clear()
    return point


def races(rank: int, fault: Fault, of_code: Callable[[Code], Code], chunks: int) -> list[str]:
    device, module = register(), Module()
    link = Transport.create(lanes=2, timeout=PATIENT, batched=True)
    options = LinearOptions(Schedule(chunks=chunks))
    with device.recording() as recording:
        together = layers(link, options, fused=True)
    begin = Transport.begin
    programs: dict[Program, Program] = {}

    def planted(self: Transport, program: Program, *args: Any, **keywords: Any) -> Any:
        faulty = replace(program, code=tuple(of_code(program.code)))
        return begin(self, programs.setdefault(program, faulty), *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "new_streams", partial(DeviceStreams, module))
        patch.setattr(Transport, "begin", planted)
        fault(patch)
        with RaceDetector(module) as detector, device.replaying(recording):
            alone = layers(link, options, fused=True)
    # Kernels ran at once, in the order of the host.
    assert all(map(torch.equal, alone, together))
    return detector.races


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_races(ranks: Any, size: int, chunks: int) -> None:
    assert ranks(size).run(races, no_fault, sound, chunks) == [[]] * size


@pytest.mark.parametrize(
    ("fault", "of_code"),
    [
        (the_posting_stream_is_not_waited_for, sound),
        (the_transfer_is_not_waited_for, sound),
        (no_fault, missing_event),
    ],
)
def test_a_missing_event_is_a_race(
    ranks: Any, fault: Fault, of_code: Callable[[Code], Code]
) -> None:
    assert all(ranks(2).run(races, fault, of_code, 3))


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_sent_is_not_taken_again_before(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    module, recording = Module(), Recording()
    device = OneDevice(partial(DeviceStreams, module))
    group = OneDeviceGroup(device, "a", 0, (0, 1), None)
    recording.add("a", Posted("send to 1", [torch.ones(4)]))
    if not kept:
        alone = process_group._Alone
        monkeypatch.setattr(process_group, "_Alone", lambda over, kept: alone(over))
    with RaceDetector(module) as detector, device.replaying(recording):
        work: Any = group.send([torch.ones(4)], 1)
        torch.zeros(4)
        work.wait()
        torch.zeros(4)
    assert bool(detector.races) is not kept
