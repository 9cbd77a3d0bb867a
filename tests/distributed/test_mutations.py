"""Mutation tests: each fault planted in the product has to fail the comparisons of the tests.

A mutant that survives is a fault that no test would notice.
"""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.ops import attention_runs, buckets
from commfuse_npu.ops.call import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Add
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import GemmScatter
from commfuse_npu.runtime import transport
from tests.distributed.programs import change_programs, new_link
from tests.limits import BRIEF
from tests.proof.test_planted_faults import altered
from tests.random_networks.case import (
    BITS_OF_TORCH,
    Bucket,
    BucketRun,
    Case,
    one_layer,
)
from tests.random_networks.compare import complaints

Fault = Callable[[pytest.MonkeyPatch], None]


def in_place_of(owner: Any, name: str, fault: Callable[[Any], Any]) -> Fault:
    """A fault that replaces ``owner.name`` by ``fault(original)``."""
    return lambda patch: patch.setattr(owner, name, fault(getattr(owner, name)))


def own_partial_first(patch: pytest.MonkeyPatch) -> None:
    """Reverse the last sum of a GEMM with a reduce-scatter, which changes only its rounding."""

    def changed(program: Program) -> Program:
        if not isinstance(program.rule, GemmScatter):
            return program
        code = list(program.code)
        last = max(at for at, instruction in enumerate(code) if isinstance(instruction, Add))
        code[last] = altered(code[last], terms=code[last].terms[::-1])
        return replace(program, code=tuple(code))

    change_programs(patch, changed)


def scaled_a_little(gemm: Any) -> Any:
    return lambda out, a, b: (gemm(out, a, b), out.mul_(1.001))


LINEARS = [
    one_layer(op, 3, dtype=dtype, schedule=Schedule(lanes=2, chunks=3))
    for op in BITS_OF_TORCH
    for dtype in (torch.float32, torch.bfloat16)
]
ATTENTION = [one_layer("attention_linear_reduce_scatter", 3)]
AVERAGES = [BucketRun(3, (Bucket(8, average=True),), lanes=2)]

WEIGHT_GRADIENT = in_place_of(
    WeightGradient, "add", lambda add: lambda self, grad, x: add(self, grad[:-1], x[:-1])
)
NOT_DIVIDED = in_place_of(buckets, "sum_ending", lambda ending: lambda divisor: ending(1))
A_KEY_TOO_FEW = in_place_of(
    attention_runs,
    "keys_of",
    lambda right: lambda run, *mask: (slice(0, run.stop - bool(run.start)), right(run, *mask)[1]),
)

MUTANTS: dict[str, tuple[Sequence[Case], Fault]] = {
    "another order of additions": (LINEARS, own_partial_first),
    "weight gradient of fewer rows": (LINEARS, WEIGHT_GRADIENT),
    "everything times 1.001": (LINEARS, in_place_of(cpu, "gemm_into", scaled_a_little)),
    "a key too few": (ATTENTION, A_KEY_TOO_FEW),
    "not divided": (AVERAGES, NOT_DIVIDED),
    "nothing": ([*LINEARS, *ATTENTION, *AVERAGES], lambda patch: None),
}


def under_test(rank: int, name: str) -> list[str]:
    """Compare the cases of a fault, as random cases are compared."""
    link = new_link()
    if name != "nothing":
        link.timeout = BRIEF  # a fault may be that a transfer never comes
    cases, plant = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return [line for case in cases for line in complaints(rank, case, link)]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_noticed(ranks, name: str) -> None:
    outcomes = ranks(3).outcomes(under_test, name, grace=3)
    assert any(outcomes) == (name != "nothing"), outcomes
    # An assertion about numbers, or the transport's own error; not a crash of the mutant itself.
    kinds = (AssertionError, transport.TransportError, ValueError, RuntimeError, TimeoutError)
    assert all(isinstance(outcome, (list, *kinds)) for outcome in outcomes), outcomes
    assert not any(isinstance(outcome, BrokenProcessPool) for outcome in outcomes), outcomes
