"""A missing wait or event is detected in every run."""

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
    """Results of two micro-batches of three layers, cloned as the next reader sees them."""
    ops = "all_gather_linear", "linear_reduce_scatter", "sharded_linear"
    layers = tuple(Layer(op, 32, 32, schedule=Schedule(chunks=chunks)) for op in ops)
    case = Network(link.size, layers, rows=8, micro_batches=2, rounded=True)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            change_programs(patch, lambda plan: replace(plan, code=tuple(fault(plan.code))))
        results = run_network(case, form, link)
    return {name: None if value is None else value.clone() for name, value in results.items()}


def missing_event(code: Code) -> Code:
    """The main stream does not wait for the side stream, except for the last time."""
    holds = [
        k for k, step in enumerate(code) if isinstance(step, WaitEvent) and not step.on_side_stream
    ]
    return [step for k, step in enumerate(code) if k not in holds[:-1]]


def missing_last_event(code: Code) -> Code:
    return [step for step in code if not isinstance(step, WaitEvent) or step.on_side_stream]


def event_of_the_wrong_stream(code: Code) -> Code:
    """Events are recorded on the stream that waits for them."""
    return [
        step._replace(on_side_stream=False) if isinstance(step, RecordEvent) else step
        for step in code
    ]


def no_wait(code: Code) -> Code:
    return [step for step in code if not isinstance(step, Wait)]


def sends_not_waited_for(code: Code) -> Code:
    """The operation ends while its messages are still being sent."""
    return [step._replace(sends=()) if isinstance(step, Wait) else step for step in code]


def said_of(rank: int, fault: Fault, batched: bool) -> str:
    """ "other bits" if the results show the fault, "" if they do not; late transfers may raise."""
    link = Transport.create(lanes=2, timeout=PATIENT, batched=batched)
    plain = computed("plain", 4, link)
    link.timeout = BRIEF
    results = computed("fused", 4, link, fault)
    late.finish()
    return "other bits" if differences(results, plain) else ""


@pytest.mark.parametrize(
    ("fault", "tells"),
    [(no_wait, "other bits|changed before its wait"), (sends_not_waited_for, "changed before its")],
)
def test_a_missing_wait_is_noticed(ranks: Any, fault: Fault, tells: str) -> None:
    # A batch completes with its receive; single posts have a separate wait for the send.
    outcomes = ranks(3).outcomes(said_of, fault, fault is no_wait)
    # A rank that raises leaves the others waiting.
    assert any(re.search(tells, result.value or str(result.error)) for result in outcomes), outcomes
    assert all(result.value != "" for result in outcomes)


def races(rank: int, fault: Fault) -> list[str]:
    link, module = Transport.create(lanes=2, timeout=PATIENT), Module()
    plain = computed("fused", 3, link)
    with late.streams_of(module), RaceDetector(module) as detector:
        results = computed("fused", 3, link, fault)
    # Kernels ran synchronously, in the order of the host.
    assert not differences(results, plain)
    return detector.races


@pytest.mark.parametrize("fault", [missing_event, missing_last_event, event_of_the_wrong_stream])
def test_a_missing_event_is_a_race(ranks: Any, fault: Fault) -> None:
    assert ranks(2).run(races, list) == [[], []]
    assert all(ranks(2).run(races, fault))
