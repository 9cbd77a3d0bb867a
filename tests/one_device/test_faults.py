"""Faults planted in what is run alone; on streams that are late each of them shows, every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_npu.ops import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Hold, Instruction, Program, Record, Wait
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.one_device.backend import register
from tests.one_device.layers import layers
from tests.one_device.recording import ReplayError

Code = Sequence[Instruction]


def sound(code: Code) -> Code:
    return code


def missing_event(code: Code) -> Code:
    """The first stream goes on without what the second one does for it, but for the last time."""
    holds = [at for at, one in enumerate(code) if isinstance(one, Hold) and not one.aside]
    return [one for at, one in enumerate(code) if at not in holds[:-1]]


def missing_last_event(code: Code) -> Code:
    return [one for one in code if not isinstance(one, Hold) or one.aside]


def event_of_the_wrong_stream(code: Code) -> Code:
    """It is recorded on the stream that waits for it."""
    return [one._replace(aside=False) if isinstance(one, Record) else one for one in code]


def wait_on_the_wrong_stream(code: Code) -> Code:
    """The second stream waits for what the first one reads."""
    return [one._replace(aside=True) if isinstance(one, Wait) else one for one in code]


def buffer_given_back_too_early(code: Code) -> Code:
    """The operation is over while its messages are still being sent."""
    return [one._replace(sends=()) if isinstance(one, Wait) else one for one in code]


def caught(rank: int, fault: Callable[[Code], Code], chunks: int) -> str:
    """What tells of the fault; "" if nothing does."""
    device = register()
    # A batch is over with its receive; single posts have a wait for what is sent.
    batched = fault is not buffer_given_back_too_early
    link = Transport.create(lanes=2, timeout=PATIENT, batched=batched)
    options = LinearOptions(Schedule(chunks=chunks))
    with device.recording() as recording:
        together = layers(link, options, fused=True)
    begin = Transport.begin

    def planted(self: Transport, program: Program, *args: Any, **keywords: Any) -> Any:
        faulty = programs.setdefault(program, replace(program, code=tuple(fault(program.code))))
        return begin(self, faulty, *args, **keywords)

    programs: dict[Program, Program] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "begin", planted)
        try:
            with device.replaying(recording):
                found = layers(link, options, fused=True)
        except ReplayError as error:
            return str(error)
        except (IndexError, KeyError):
            # What is aside finds nothing any more of the operation that it belongs to.
            return "the operation was over before what is aside"
    assert any(faulty.code != program.code for program, faulty in programs.items()) or (
        fault is sound
    ), "nothing was planted"
    return "" if all(map(torch.equal, found, together)) else "other bits"


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_without_a_fault_nothing_is_found(ranks: Any, size: int, chunks: int) -> None:
    assert ranks(size).run(caught, sound, chunks) == [""] * size


@pytest.mark.parametrize(
    ("fault", "tells"),
    [
        (missing_event, "other bits|not written yet"),
        (missing_last_event, "over before what is aside"),
        (event_of_the_wrong_stream, "over before what is aside"),
        (wait_on_the_wrong_stream, "over before what is aside"),
        (buffer_given_back_too_early, "written over before it was sent"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_caught(
    ranks: Any, size: int, chunks: int, fault: Callable[[Code], Code], tells: str
) -> None:
    for said in ranks(size).run(caught, fault, chunks):
        assert re.search(tells, said)
