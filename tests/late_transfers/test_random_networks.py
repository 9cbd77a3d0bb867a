"""Random cases on a mock device, and faults that it has to notice; more with ``--random-cases``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import RecordEvent, Wait, WaitEvent
from commfuse_npu.plan.program import Program
from tests.distributed.programs import change_programs, transport
from tests.late_transfers.device import device
from tests.random_networks.campaign import campaign
from tests.random_networks.case import Case, Layer, Network
from tests.random_networks.compare import at_rest, differences, quiet, run_case
from tests.random_networks.values import round_once


def complaints(rank: int, case: Case) -> list[str]:
    """Differences from the plain form in a bit, and races."""
    case = replace(case, batched=True)
    link = transport(case.batched, case.lanes)
    with quiet(), round_once():
        with device() as mock:
            ours = run_case(case, "fused")
        at_rest(link)
        plain = run_case(case, "plain")
    return [*differences(ours, plain), *dict.fromkeys(mock.races)]


@pytest.mark.parametrize(("size", "cases"), [(2, 25), pytest.param(3, 15, marks=pytest.mark.long)])
def test_fused_is_plain_and_events_order_all(request, ranks, size: int, cases: int) -> None:
    campaign(request, ranks(size), cases, complaints)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "no waits": lambda step: None if isinstance(step, Wait) else step,
    "no events for the main stream": lambda step: (
        None if isinstance(step, WaitEvent) and not step.on_side_stream else step
    ),
    "events of the wrong stream": lambda step: (
        step._replace(on_side_stream=False) if isinstance(step, RecordEvent) else step
    ),
}
"""What replaces an instruction, if anything does."""


def noticed(rank: int, fault: str) -> list[str]:
    """Complaints about two micro-batches of two layers."""
    ops = "all_gather_linear", "linear_reduce_scatter"
    layers = tuple(Layer(op, 32, 32, schedule=Schedule(chunks=3)) for op in ops)
    case = Network(3, layers, rows=8, micro_batches=2, rounded=True)
    with pytest.MonkeyPatch.context() as patch:

        def faulty(program: Program) -> Program:
            code = (FAULTS[fault](step) for step in program.code)
            return replace(program, code=tuple(step for step in code if step is not None))

        change_programs(patch, faulty)
        return complaints(rank, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_or_event_is_noticed(ranks: Any, fault: str) -> None:
    outcomes = ranks(3).outcomes(noticed, fault)
    assert all(isinstance(outcome, list) and outcome for outcome in outcomes), outcomes
