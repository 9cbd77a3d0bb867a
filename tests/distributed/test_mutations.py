"""Faults planted in the product: each has to make the tests of programs and layers fail.

A mutant that survives is a fault that nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.ops import buckets, weight
from commfuse_npu.ops.buckets import BucketOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Add, Compute, Copy, Instruction, Post, Program, Span, Wait
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime import executor, transport
from tests.distributed import test_buckets, test_programs
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import one_layer
from tests.random_networks.compare import complaints

Mutation = Callable[[pytest.MonkeyPatch, int], None]
Code = list[Instruction]


def of_program(rule: str, change: Callable[[Code, Program], Code]) -> Mutation:
    """A fault in the programs of one rule, on all ranks."""

    def plant(patch: pytest.MonkeyPatch, rank: int) -> None:
        begin = transport.Transport.begin

        def planted(self, program, *args, **kwargs):
            if program.rule[0] == rule:
                program = replace(program, code=tuple(change(list(program.code), program)))
            return begin(self, program, *args, **kwargs)

        patch.setattr(transport.Transport, "begin", planted)

    return plant


def places(code: Code, kind: type[Instruction]) -> list[int]:
    return [at for at, one in enumerate(code) if isinstance(one, kind)]


def own_block_moved(code: Code, program: Program) -> Code:
    """The first piece of work comes last."""
    first = code.pop(places(code, Compute)[0])
    return [*code, first]


def own_block_first(code: Code, program: Program) -> Code:
    last = code.pop(places(code, Compute)[-1])
    return [last, *code]


def last_transfer_dropped(code: Code, program: Program) -> Code:
    last = max(program.transfers)
    kept = []
    for one in code:
        ends = [end for end in one if end is not None] if isinstance(one, Post) else []
        if any(end.transfer.step == last for end in ends):
            continue
        if isinstance(one, Wait):
            one = one._replace(
                receives=tuple(step for step in one.receives if step != last),
                sends=tuple(step for step in one.sends if step != last),
            )
        kept.append(one)
    return kept


def a_transfer_of_one_rank_dropped(code: Code, program: Program) -> Code:
    return last_transfer_dropped(code, program) if program.rank == 0 else code


def changed(code: Code, kind: type[Instruction], how: Callable[[Any], Instruction]) -> Code:
    at = places(code, kind)[-1]
    code[at] = how(code[at])
    return code


def added_twice(code: Code, program: Program) -> Code:
    return changed(code, Add, lambda one: one._replace(terms=(*one.terms, one.terms[-1])))


def own_partial_first(code: Code, program: Program) -> Code:
    """The same sum but for rounding."""
    return changed(code, Add, lambda one: one._replace(terms=one.terms[::-1]))


def another_block_sent(code: Code, program: Program) -> Code:
    """The rows of the own block instead of the peer's."""
    at = next(at for at in places(code, Post) if code[at].send is not None)
    post = code[at]
    rows = post.send.span.stop - post.send.span.start
    mine = Span(post.send.span.buffer, program.rank * rows, (program.rank + 1) * rows)
    code[at] = post._replace(send=post.send._replace(span=mine))
    return code


def copied_elsewhere(code: Code, program: Program) -> Code:
    def first_rows(one: Copy) -> Copy:
        length = one.out.stop - one.out.start
        return one._replace(out=one.out._replace(start=0, stop=length))

    return changed(code, Copy, first_rows)


def other_columns(code: Code, program: Program) -> Code:
    """A group of columns is made of the weight's first columns."""

    def first_columns(one: Compute) -> Compute:
        a, weight = one.ins
        first, last = weight.columns
        return one._replace(ins=(a, weight._replace(columns=(0, last - first))))

    return changed(code, Compute, first_columns)


def used_before_it_arrives(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Scratch is what it was before, and nobody waits before the end."""

    def no_early_wait(self, receives, sends):
        if not any(isinstance(one, Wait) for one in self.program.code[self._at + 1 :]):
            wait(self, list(self._receives), list(self._sends))

    def poisoned(self, *, late):
        before = len(self._arenas)
        take(self, late=late)
        for arena in self._arenas[before:]:
            arena.memory.fill_(-1)

    take, wait = executor.Running._take_scratch, executor.Running._wait
    patch.setattr(executor.Running, "_take_scratch", poisoned)
    patch.setattr(executor.Running, "_wait", no_early_wait)


def one_slot_for_all(what: str) -> Mutation:
    """Scratch of one kind shares its memory, without a wait before it is used again."""

    def plant(patch: pytest.MonkeyPatch, rank: int) -> None:
        begin = transport.Transport.begin

        def planted(self, program, *args, **kwargs):
            scratch = tuple(
                one._replace(slot=what) if one.name.startswith(what) else one
                for one in program.scratch
            )
            return begin(self, replace(program, scratch=scratch), *args, **kwargs)

        patch.setattr(transport.Transport, "begin", planted)

    return plant


def no_wgrad_of_what_arrived_last(patch: pytest.MonkeyPatch, rank: int) -> None:
    add = weight.WeightGradient.add
    patch.setattr(
        weight.WeightGradient,
        "add",
        lambda self, grad, x: add(self, grad[: len(grad) - 1], x[: len(x) - 1]),
    )


def scaled_a_little(patch: pytest.MonkeyPatch, rank: int) -> None:
    gemm = cpu.gemm_into

    def scaled(out, a, b):
        gemm(out, a, b)
        out.mul_(1.001)

    patch.setattr(cpu, "gemm_into", scaled)


def one_end_of_a_bucket_mixed_up(code: Code, program: Program) -> Code:
    """The two ends of a bucket's gather do not mean the same chunk."""
    receives = [at for at in places(code, Post) if code[at].receive is not None]
    spans = [code[at].receive.span for at in receives]
    peers = program.size - 1
    for at, span in zip(receives, spans[peers:] + spans[:peers], strict=True):
        code[at] = code[at]._replace(receive=code[at].receive._replace(span=span))
    return code


def bucket_slot_lent_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A partial arrives where another one has not been added yet."""
    rule = buckets.bucket_scatter

    def one_slot(place: Place, rows: int, stack: int, in_flight: int) -> Program:
        made = rule(place, rows, stack, in_flight + 1)
        scratch = (
            one if one.name == "total" else one._replace(slot="partials") for one in made.scratch
        )
        return replace(made, scratch=tuple(scratch))

    patch.setattr(buckets, "bucket_scatter", one_slot)


def own_gradient_first(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The same sum but for rounding."""
    rule = buckets.bucket_scatter

    def own_too(place: Place, rows: int, *stacks: int) -> Program:
        made = rule(place, rows, *stacks)

        def changed(one: Instruction) -> Instruction:
            if not isinstance(one, Add) or any(span == one.out for span, _ in one.terms):
                return one
            start = place.rank * rows
            own = Span("bucket", start + one.out.start, start + one.out.stop)
            return one._replace(terms=((own, 1), *one.terms))

        return replace(made, code=tuple(map(changed, made.code)))

    patch.setattr(buckets, "bucket_scatter", own_too)
    patch.setattr(buckets, "sum_ending", lambda divisor: lambda out, total, own: out.copy_(total))


MUTANTS: list[tuple[str, Mutation]] = [
    ("gather: own block not first", of_program("gather_use", own_block_moved)),
    ("scatter: own block not last", of_program("produce_scatter", own_block_first)),
    ("gather: last transfer dropped", of_program("gather_gemm", last_transfer_dropped)),
    ("scatter: last transfer dropped", of_program("gemm_scatter", last_transfer_dropped)),
    ("gather: one rank drops it", of_program("gather_gemm", a_transfer_of_one_rank_dropped)),
    ("gather: copied elsewhere", of_program("gather_gemm", copied_elsewhere)),
    ("scatter: another block sent", of_program("gemm_scatter", another_block_sent)),
    ("scatter: other columns", of_program("gemm_scatter", other_columns)),
    ("backward: other columns", of_program("column_backward", another_block_sent)),
    ("a partial added twice", of_program("gemm_scatter", added_twice)),
    ("another order of additions", of_program("gemm_scatter", own_partial_first)),
    ("used before it arrives", used_before_it_arrives),
    ("overwritten before it is sent", one_slot_for_all("product")),
    ("one slot for all receives", one_slot_for_all("partials")),
    ("weight gradient of fewer rows", no_wgrad_of_what_arrived_last),
    ("everything times 1.001", scaled_a_little),
    ("a bucket's partial added twice", of_program("bucket_scatter", added_twice)),
    ("a bucket's slot lent twice", bucket_slot_lent_twice),
    ("own gradient first", own_gradient_first),
    ("chunks of a bucket mixed up", of_program("bucket_gather", one_end_of_a_bucket_mixed_up)),
]


def under_test(rank: int, name: str | None) -> None:
    """What the other files run, in small: a gather, a sum, layers and buckets, fp32 and bf16."""
    link = transport.Transport.create(lanes=2, timeout=PATIENT)
    if name is not None:
        link.timeout = BRIEF  # a fault may be that a transfer never comes
    plant = dict(MUTANTS).get(name, lambda patch, rank: None)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, rank)
        schedule = Schedule(lanes=2, chunks=3)
        for dtype in (torch.float32, torch.bfloat16):
            test_programs.gather(rank, link, schedule, dtype)
            test_programs.scatter(rank, link, schedule, dtype)
            for op, rounded in product(("all_gather_linear", "linear_reduce_scatter"), (1, 0)):
                case = one_layer(op, 3, dtype=dtype, schedule=schedule, rounded=bool(rounded))
                found = complaints(rank, case, link)
                assert not found, found
            options = BucketOptions(schedule, scratch_bytes=0)
            test_buckets.check_sum(rank, link, options, 64, dtype)
            # As many elements in every chunk: a message that is too long would end the process.
            test_buckets.check_gather(rank, link, options, 63, dtype)


def test_without_a_fault_it_passes(ranks) -> None:
    ranks(3).run(under_test, None)


IN_SHORT = {
    "gather: own block not first",
    "scatter: last transfer dropped",
    "another order of additions",
    "overwritten before it is sent",
    "everything times 1.001",
    "a bucket's partial added twice",
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.long)
        for name, _ in MUTANTS
    ],
)
def test_a_planted_fault_is_noticed(ranks, name: str) -> None:
    outcomes = ranks(3).outcomes(under_test, name, grace=3)
    found = [outcome for outcome in outcomes if outcome.error is not None]
    assert found, f"nothing noticed: {name}"
    # An assertion about numbers, or the transport's own error; not a crash of the mutant itself.
    kinds = (AssertionError, transport.TransportError, ValueError, IndexError, RuntimeError)
    kinds = (*kinds, TimeoutError)
    assert all(isinstance(outcome.error, kinds) for outcome in found), found
