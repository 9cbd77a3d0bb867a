"""A column-, a row-parallel and a fully sharded layer, with faults in their programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Hold, Instruction, Record, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.transport import Transport
from tests.distributed.faulty_programs import change_programs
from tests.random_networks.case import Form, Layer, Network
from tests.random_networks.network_run import run_network
from tests.random_networks.values import Found

Code = Sequence[Instruction]
Fault = Callable[[Code], Code]


def case(size: int, chunks: int) -> Network:
    """Two micro-batches."""
    ops = "all_gather_linear", "linear_reduce_scatter", "sharded_linear"
    layers = tuple(Layer(op, 32, 32, schedule=Schedule(chunks=chunks)) for op in ops)
    return Network(size, layers, rows=8, micro_batches=2, rounded=True)


def computed(case: Network, form: Form, link: Transport) -> Found:
    """Outputs and gradients, as whoever reads them next gets them."""
    found = run_network(case, form, link)
    return {name: None if value is None else value.clone() for name, value in found.items()}


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
    """The side stream waits for what the first one reads."""
    return [one._replace(aside=True) if isinstance(one, Wait) else one for one in code]


def no_wait(code: Code) -> Code:
    return [one for one in code if not isinstance(one, Wait)]


def sends_not_waited_for(code: Code) -> Code:
    """The operation is over while its messages are still being sent."""
    return [one._replace(sends=()) if isinstance(one, Wait) else one for one in code]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """In this block the programs that are begun have a fault."""
    other = []

    def changed(program: Program) -> Program:
        code = tuple(fault(program.code))
        other.append(code != program.code)
        return replace(program, code=code)

    with pytest.MonkeyPatch.context() as patch:
        change_programs(patch, changed)
        yield
    assert fault is sound or any(other)
