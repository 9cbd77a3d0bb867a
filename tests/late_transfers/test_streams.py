"""A wait or an event that is missing shows every time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Instruction, RecordEvent, Wait, WaitEvent
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import change_programs
from tests.late_transfers import late
from tests.late_transfers.race_detector import Module, RaceDetector
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import Layer, Network
from tests.random_networks.compare import differences
from tests.random_networks.network_run import run_network
from tests.random_networks.values import Found

Code = Sequence[Instruction]
Fault = Callable[[Code], Code]


def computed(form: Any, chunks: int, link: Transport, fault: Fault | None = None) -> Found:
    """Two micro-batches of three layers, as whoever reads their results next gets them."""
    ops = "all_gather_linear", "linear_reduce_scatter", "sharded_linear"
    layers = tuple(Layer(op, 32, 32, schedule=Schedule(chunks=chunks)) for op in ops)
    case = Network(link.size, layers, rows=8, micro_batches=2, rounded=True)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            change_programs(patch, lambda made: replace(made, code=tuple(fault(made.code))))
        found = run_network(case, form, link)
    return {name: None if value is None else value.clone() for name, value in found.items()}


def missing_event(code: Code) -> Code:
    """The first stream goes on without what the second one does for it, but for the last time."""
    holds = [
        at for at, one in enumerate(code) if isinstance(one, WaitEvent) and not one.on_side_stream
    ]
    return [one for at, one in enumerate(code) if at not in holds[:-1]]


def missing_last_event(code: Code) -> Code:
    return [one for one in code if not isinstance(one, WaitEvent) or one.on_side_stream]


def event_of_the_wrong_stream(code: Code) -> Code:
    """It is recorded on the stream that waits for it."""
    return [
        one._replace(on_side_stream=False) if isinstance(one, RecordEvent) else one for one in code
    ]


def no_wait(code: Code) -> Code:
    return [one for one in code if not isinstance(one, Wait)]


def sends_not_waited_for(code: Code) -> Code:
    """The operation is over while its messages are still being sent."""
    return [one._replace(sends=()) if isinstance(one, Wait) else one for one in code]


def said_of(rank: int, fault: Fault, batched: bool) -> str:
    """What tells of a wait that is missing; "" if nothing does."""
    link = Transport.create(lanes=2, timeout=PATIENT, batched=batched)
    plain = computed("plain", 4, link)
    link.timeout = BRIEF
    found = computed("fused", 4, link, fault)
    late.finish()
    return "other bits" if differences(found, plain) else ""


@pytest.mark.parametrize(
    ("fault", "tells"),
    [(no_wait, "other bits|changed before its wait"), (sends_not_waited_for, "changed before its")],
)
def test_a_missing_wait_is_noticed(ranks: Any, fault: Fault, tells: str) -> None:
    # A batch is over with its receive; single posts have a wait for what is sent.
    outcomes = ranks(3).outcomes(said_of, fault, fault is no_wait)
    # A rank that is found out leaves the others waiting.
    assert any(re.search(tells, one.value or str(one.error)) for one in outcomes), outcomes
    assert all(one.value != "" for one in outcomes)


def races(rank: int, fault: Fault) -> list[str]:
    link, module = Transport.create(lanes=2, timeout=PATIENT), Module()
    plain = computed("fused", 3, link)
    with late.streams_of(module), RaceDetector(module) as detector:
        found = computed("fused", 3, link, fault)
    # Kernels ran at once, in the order of the host.
    assert not differences(found, plain)
    return detector.races


@pytest.mark.parametrize("fault", [missing_event, missing_last_event, event_of_the_wrong_stream])
def test_a_missing_event_is_a_race(ranks: Any, fault: Fault) -> None:
    assert ranks(2).run(races, list) == [[], []]
    assert all(ranks(2).run(races, fault))
