"""Mutation tests: each fault planted in the product has to fail the comparisons of the tests.

A mutant that survives is a fault that no test would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.ops import attention_runs
from commfuse_npu.ops.call import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Add
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime import transport
from tests.distributed.programs import change_programs
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import one_layer
from tests.random_networks.compare import complaints

Fault = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[int, transport.Transport], list[str]]

# The package exports the function of this name.
sharded_linear: Any = import_module("commfuse_npu.ops.sharded_linear")


def in_place_of(owner: Any, name: str, fault: Callable[[Any], Any]) -> Fault:
    """A fault that replaces ``owner.name`` by ``fault(original)``."""
    return lambda patch: patch.setattr(owner, name, fault(getattr(owner, name)))


def own_partial_first(patch: pytest.MonkeyPatch) -> None:
    """Reverse the last sum of a GEMM with a reduce-scatter, which changes only its rounding."""

    def changed(program: Program) -> Program:
        if program.rule[0] != "gemm_scatter":
            return program
        code = list(program.code)
        last = max(at for at, instruction in enumerate(code) if isinstance(instruction, Add))
        code[last] = code[last]._replace(terms=code[last].terms[::-1])
        return replace(program, code=tuple(code))

    change_programs(patch, changed)


def scaled_a_little(gemm: Any) -> Any:
    return lambda out, a, b: (gemm(out, a, b), out.mul_(1.001))


SCHEDULE = Schedule(lanes=2, chunks=3)


def linears(rank: int, link: transport.Transport) -> list[str]:
    found = []
    ops = "all_gather_linear", "linear_reduce_scatter"
    for op, dtype, rounded in product(ops, (torch.float32, torch.bfloat16), (True, False)):
        case = one_layer(op, 3, dtype=dtype, schedule=SCHEDULE, rounded=rounded)
        found += complaints(rank, case, link)
    return found


def sharded(rank: int, link: transport.Transport) -> list[str]:
    return complaints(rank, one_layer("sharded_linear", 3, rounded=False), link)


def attention(rank: int, link: transport.Transport) -> list[str]:
    return complaints(rank, one_layer("attention_linear_reduce_scatter", 3), link)


WEIGHT_GRADIENT = in_place_of(
    WeightGradient, "add", lambda add: lambda self, grad, x: add(self, grad[:-1], x[:-1])
)
NOT_DIVIDED = in_place_of(sharded_linear, "sum_ending", lambda ending: lambda divisor: ending(1))
A_KEY_TOO_FEW = in_place_of(
    attention_runs,
    "keys_of",
    lambda right: lambda run, *mask: (slice(0, run.stop - bool(run.start)), right(run, *mask)[1]),
)

MUTANTS: dict[str, tuple[Check, Fault]] = {
    "another order of additions": (linears, own_partial_first),
    "weight gradient of fewer rows": (linears, WEIGHT_GRADIENT),
    "everything times 1.001": (linears, in_place_of(cpu, "gemm_into", scaled_a_little)),
    "a key too few": (attention, A_KEY_TOO_FEW),
    "not divided": (sharded, NOT_DIVIDED),
}


def under_test(rank: int, name: str | None = None) -> list[str]:
    """Short versions of the comparisons of the other test files, with the fault ``name``."""
    link = transport.Transport.create(lanes=2, timeout=PATIENT)
    checks = {check for check, _ in MUTANTS.values()} if name is None else {MUTANTS[name][0]}
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            link.timeout = BRIEF  # a fault may be that a transfer never comes
            MUTANTS[name][1](patch)
        return [
            line
            for check in sorted(checks, key=lambda check: check.__name__)
            for line in check(rank, link)
        ]


def test_without_a_fault_it_passes(ranks) -> None:
    assert ranks(3).run(under_test) == [[]] * 3


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(ranks, name: str) -> None:
    outcomes = ranks(3).outcomes(under_test, name, grace=3)
    assert any(outcome.error or outcome.value for outcome in outcomes), f"nothing noticed: {name}"
    # An assertion about numbers, or the transport's own error; not a crash of the mutant itself.
    kinds = (AssertionError, transport.TransportError, ValueError, RuntimeError, TimeoutError)
    assert all(isinstance(outcome.error, kinds) for outcome in outcomes if outcome.error), outcomes
