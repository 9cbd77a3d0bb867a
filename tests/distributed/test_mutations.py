"""Faults planted in the product: each has to make the tests of programs and layers fail.

A mutant that survives is a fault that nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import cpu
from commfuse_npu.ops import buckets, head_groups
from commfuse_npu.ops.attention_mask import AttentionMask
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.buckets import BucketOptions
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Add, Instruction, Span, Wait
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import blocks
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime import collective_transport, executor, transport
from tests.distributed import test_buckets, test_programs, test_ulysses
from tests.distributed.faulty_programs import (
    Fault,
    added_twice,
    another_block_sent,
    copied_elsewhere,
    last_transfer_dropped,
    of_program,
    one_end_of_a_bucket_mixed_up,
    one_slot_for_all,
    other_columns,
    own_block_first,
    own_block_moved,
    own_partial_first,
    used_twice,
)
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import one_layer
from tests.random_networks.compare import complaints, in_full

Check = Callable[[int, transport.Transport], list[str]]

# The package exports the function of this name.
sharded_linear: Any = import_module("commfuse_npu.ops.sharded_linear")


def in_place_of(owner: Any, name: str, fault: Callable[[Any], Any]) -> Fault:
    """``fault(original)`` in the place of what the product has there."""
    return lambda patch: patch.setattr(owner, name, fault(getattr(owner, name)))


def used_before_it_arrives(patch: pytest.MonkeyPatch) -> None:
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


def scaled_a_little(gemm: Any) -> Any:
    def scaled(out, a, b):
        gemm(out, a, b)
        out.mul_(1.001)

    return scaled


def own_gradient_first(patch: pytest.MonkeyPatch) -> None:
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


def columns_of_the_next_group(matrix: Any) -> Any:
    def next_group(self, group):
        if self._heads is None:
            group = (group + 1) % (self._weight.shape[1] // self.features)
        return matrix(self, group)

    return next_group


def rows_of_the_last_rank_win(_: Any) -> Any:
    """Gradients of repeated key heads replace each other."""

    def last(self, whole):
        blocks = whole.view(len(self.bounds), -1, self.features)
        total = whole.new_zeros((blocks.shape[1], self._weight_rows))
        for group, block in enumerate(blocks):
            for rows, columns in self.parts(group):
                total[:, rows] = block[:, columns]
        return total

    return last


def statistics_of_the_first_run(kept: Any) -> Any:
    """The backward of every run with the softmax of one of them."""
    seen: dict[Any, Any] = {}
    return lambda self, run: seen.setdefault((id(self), run.stop - run.start), kept(self, run))


def blocks_in_reverse(swap: Any) -> Any:
    def reverse(blocks, group):
        received = swap(blocks, group)
        return received.view(group.size(), -1).flip(0).view_as(received)

    return reverse


def keys(of: Callable[[slice], slice]) -> Fault:
    """Queries see other keys than their mask says."""
    return in_place_of(AttentionMask, "of", lambda right: lambda mask, run: (of(run),
                       right(mask, run)[1]))  # fmt: skip


def bias_of_the_first_block(columns: Any) -> Any:
    def first(y, x, block, bias, run):
        columns(y, x, block, None, run)
        y[:, run].add_(bias[: run.stop - run.start])

    return first


SCHEDULE = Schedule(lanes=2, chunks=3)
DTYPES = (torch.float32, torch.bfloat16)


def programs(rank: int, link: transport.Transport) -> list[str]:
    for dtype in DTYPES:
        test_programs.gather(rank, link, SCHEDULE, dtype)
        test_programs.scatter(rank, link, SCHEDULE, dtype)
    return []


def linears(rank: int, link: transport.Transport) -> list[str]:
    found = []
    for op in ("all_gather_linear", "linear_reduce_scatter"):
        for dtype in DTYPES:
            case = one_layer(op, 3, dtype=dtype, schedule=SCHEDULE)
            for rounded in (True, False):
                found += complaints(rank, replace(case, rounded=rounded), link)
    return found


def of_buckets(rank: int, link: transport.Transport) -> list[str]:
    options = BucketOptions(SCHEDULE)
    for dtype in DTYPES:
        test_buckets.check_sum(rank, link, options, 64, dtype)
        # As many elements in every chunk: a message that is too long would end the process.
        test_buckets.check_gather(rank, link, options, 63, dtype)
    return []


def sharded(rank: int, link: transport.Transport) -> list[str]:
    return complaints(rank, one_layer("sharded_linear", 3, rounded=False), link)


def attention(rank: int, link: transport.Transport) -> list[str]:
    return in_full(rank, [one_layer("attention_linear_reduce_scatter", 3)])


def heads(rank: int, link: transport.Transport) -> list[str]:
    cases = [test_ulysses.whole_layer(3, last) for last in test_ulysses.ATTEND]
    cases += [one_layer(op, 3, dtype=torch.bfloat16) for op in test_ulysses.EACH[2:]]
    return in_full(rank, cases) + test_ulysses.rounded_twice(rank)


WEIGHT_GRADIENT = in_place_of(
    WeightGradient, "add", lambda add: lambda self, grad, x: add(self, grad[:-1], x[:-1])
)
NO_BIAS = in_place_of(
    head_groups.HeadsToRows,
    "forward",
    lambda made: lambda self, weight, bias, *heads: made(self, weight, None, *heads),
)
LAST_BLOCK = in_place_of(
    sharded_linear,
    "add_dgrad",
    lambda add: (
        lambda total, grad, block, run: run.stop == grad.shape[1] or add(total, grad, block, run)
    ),
)
OTHER_RANK = in_place_of(
    sharded_linear,
    "wgrad_into",
    lambda wgrad: lambda out, grad, x, run: wgrad(out, grad.roll(len(out), 1), x, run),
)
OWN_DTYPE = in_place_of(head_groups, "_zeros", lambda _: lambda like, *shape: like.new_zeros(shape))
ARRIVALS = in_place_of(blocks, "used_pieces", lambda pieces: lambda *given: pieces(*given)[::-1])

MUTANTS: dict[Check, dict[str, Fault]] = {
    programs: {
        "own block not first": of_program("gather_use", own_block_moved),
        "own block not last": of_program("produce_scatter", own_block_first),
    },
    linears: {
        "last transfer of a gather dropped": of_program("gather_gemm", last_transfer_dropped),
        "last transfer dropped": of_program("gemm_scatter", last_transfer_dropped),
        "copied elsewhere": of_program("gather_gemm", copied_elsewhere),
        "another block sent": of_program("gemm_scatter", another_block_sent),
        "another block sent by the backward": of_program("column_backward", another_block_sent),
        "other columns": of_program("gemm_scatter", other_columns),
        "a partial added twice": of_program("gemm_scatter", added_twice),
        "another order of additions": of_program("gemm_scatter", own_partial_first),
        "used before it arrives": used_before_it_arrives,
        "overwritten before it is sent": one_slot_for_all("product"),
        "one slot for all receives": one_slot_for_all("partials"),
        "weight gradient of fewer rows": WEIGHT_GRADIENT,
        "everything times 1.001": in_place_of(cpu, "gemm_into", scaled_a_little),
    },
    of_buckets: {
        "a partial added twice": of_program("bucket_scatter", added_twice),
        "a slot lent twice": one_slot_for_all("partials"),
        "own gradient first": own_gradient_first,
        "chunks mixed up": of_program("bucket_gather", one_end_of_a_bucket_mixed_up),
    },
    heads: {
        "another block sent": of_program("exchange", another_block_sent),
        "copied elsewhere": of_program("exchange", copied_elsewhere),
        "a block used twice": of_program("exchange", used_twice),
        "other columns": in_place_of(head_groups.HeadGroups, "_matrix", columns_of_the_next_group),
        "sums in the dtype of the weight, also in the plain form": OWN_DTYPE,
        "the last rank wins": in_place_of(
            head_groups.HeadRows, "add_up", rows_of_the_last_rank_win
        ),
        "one softmax for all": in_place_of(AttentionRuns, "_kept", statistics_of_the_first_run),
        "no bias": NO_BIAS,
        "in reverse": in_place_of(collective_transport, "all_to_all_rows", blocks_in_reverse),
        # The projection adds what arrived in another order: the same but for rounding.
        "another order of arrivals": ARRIVALS,
    },
    attention: {
        "a key too few": keys(lambda run: slice(0, run.stop - 1 if run.start else run.stop)),
        "all keys": keys(lambda run: slice(None)),
        "keys from the first query on": keys(lambda run: run),
    },
    sharded: {
        "not divided": in_place_of(
            sharded_linear, "sum_ending", lambda ending: lambda divisor: ending(1)
        ),
        "bias of the first block": in_place_of(
            sharded_linear, "columns_into", bias_of_the_first_block
        ),
        "last block missing": LAST_BLOCK,
        "weight gradient for another rank": OTHER_RANK,
    },
}


def under_test(rank: int, checks: Sequence[Check], name: str | None = None) -> list[str]:
    """What the other files run, in small."""
    link = transport.Transport.create(lanes=2, timeout=PATIENT)
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            link.timeout = BRIEF  # a fault may be that a transfer never comes
            MUTANTS[checks[0]][name](patch)
        return [line for check in checks for line in check(rank, link)]


def test_without_a_fault_it_passes(ranks) -> None:
    assert ranks(3).run(under_test, list(MUTANTS)) == [[]] * 3


IN_SHORT = {
    "own block not first",
    "last transfer dropped",
    "another order of additions",
    "overwritten before it is sent",
    "everything times 1.001",
    "a partial added twice",
}


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(
            check,
            name,
            marks=pytest.mark.long if check in (programs, linears) and name not in IN_SHORT else (),
        )
        for check, faults in MUTANTS.items()
        for name in faults
    ],
)
def test_a_planted_fault_is_noticed(ranks, check: Check, name: str) -> None:
    outcomes = ranks(3).outcomes(under_test, [check], name, grace=3)
    assert any(outcome.error or outcome.value for outcome in outcomes), f"nothing noticed: {name}"
    # An assertion about numbers, or the transport's own error; not a crash of the mutant itself.
    kinds = (AssertionError, transport.TransportError, ValueError, IndexError, RuntimeError)
    kinds = (*kinds, TimeoutError)
    assert all(isinstance(one.error, kinds) for one in outcomes if one.error), outcomes
