"""Faults planted in the product: each has to make the tests of the pipelines and layers fail.

A mutant that survives is a fault that nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_npu.ops import bucket_exchange, linear, weight_gradient
from commfuse_npu.ops.buckets import BucketOptions
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.plan import Plan, Schedule
from commfuse_npu.runtime import pipeline, transport
from tests.distributed import test_buckets, test_linear, test_pipeline
from tests.limits import BRIEF, PATIENT

Mutation = Callable[[pytest.MonkeyPatch, int], None]


def of_plan(kind: str, change: Callable[[Plan], Plan]) -> Mutation:
    """A fault in the plans of one kind, on all ranks."""

    def plant(patch: pytest.MonkeyPatch, rank: int) -> None:
        build = Schedule.plan

        def plan(self, asked, *args, **kwargs):
            built = build(self, asked, *args, **kwargs)
            return change(built) if asked == kind and len(built.steps) > 2 else built

        patch.setattr(Schedule, "plan", plan)

    return plant


def swapped(one: int, two: int) -> Callable[[Plan], Plan]:
    """The work of two steps exchanged."""

    def change(plan: Plan) -> Plan:
        steps = list(plan.steps)
        steps[one], steps[two] = (
            replace(steps[one], compute=steps[two].compute),
            replace(steps[two], compute=steps[one].compute),
        )
        return replace(plan, steps=tuple(steps))

    return change


def last_transfer_dropped(plan: Plan) -> Plan:
    last = plan.transfers[-1].index
    steps = [
        replace(step, send=None, receive=None) if step.index == last else step
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))


def a_transfer_of_one_rank_dropped(plan: Plan) -> Plan:
    return last_transfer_dropped(plan) if plan.rank == 0 else plan


def added_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    fold = pipeline.ReduceScatter._fold

    def twice(self, position, piece, buffer):
        fold(self, position, piece, buffer)
        if position == 1 and not self._first(position, piece):
            fold(self, position, piece, buffer)

    patch.setattr(pipeline.ReduceScatter, "_fold", twice)


def other_order_of_additions(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The own partial first instead of last: the same sum but for rounding."""
    finish = pipeline.ReduceScatter.finish

    def own_first(self):
        if self._own_partial is not self._out and self._steps > 1:
            self._exchange.wait_receive(0)
            self._sum.add_(self._own_partial)
            self._own_partial.zero_()
        return finish(self)

    patch.setattr(pipeline.ReduceScatter, "finish", own_first)


def used_before_it_arrives(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Stale receive buffers: what is computed is what was there before."""

    def poison(self, position, buffer):
        buffer.fill_(-1)
        return receive(self, position, buffer)

    receive = transport.Exchange.receive
    patch.setattr(transport.Exchange, "receive", poison)
    patch.setattr(transport.Exchange, "wait_receive", lambda self, position: None)
    finish = transport.Exchange.finish

    def late(self):
        for handle in self._receives:
            handle.wait()
        for lane in self._queues:
            while self._queues[lane]:
                self._sends[self._last_sent[lane]].wait()
                self._post_ready(lane)
        for handle in self._sends.values():
            handle.wait()
        self._transport.finished(self)

    assert finish is not late
    patch.setattr(transport.Exchange, "finish", late)


def _longest(running: Any) -> int:
    """The slot into which every piece fits."""
    rows, window = running._block[0], running._window
    return max(range(window), key=lambda slot: running.plan.slot_rows(slot, rows, window))


def overwritten_before_it_is_sent(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Stale send buffers: one for all pieces, without a wait before it is used again."""
    slot = pipeline._Running._slot

    def same(self, purpose, position):
        return slot(self, purpose, _longest(self) if purpose == "out" else position)

    patch.setattr(pipeline._Running, "_slot", same)


def shared_receive_slot(patch: pytest.MonkeyPatch, rank: int) -> None:
    slot = pipeline._Running._slot

    def same(self, purpose, position):
        return slot(self, purpose, _longest(self) if purpose == "in" else position)

    patch.setattr(pipeline._Running, "_slot", same)


def no_wgrad_of_what_arrived_last(patch: pytest.MonkeyPatch, rank: int) -> None:
    add = weight_gradient.WeightGradient.add
    patch.setattr(
        weight_gradient.WeightGradient,
        "add",
        lambda self, grad, x: add(self, grad[: len(grad) - 1], x[: len(x) - 1]),
    )


def scaled_a_little(patch: pytest.MonkeyPatch, rank: int) -> None:
    gemm = linear.gemm_into

    def scaled(out, a, b):
        gemm(out, a, b)
        out.mul_(1.001)

    patch.setattr(linear, "gemm_into", scaled)


def last_chunk_first_for_receivers_only(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The two ends of a bucket's gather do not mean the same chunk."""
    incoming = bucket_exchange.Gathering._incoming

    def in_order(self, position, piece):
        self._last_first = not self._last_first
        buffer = incoming(self, position, piece)
        self._last_first = not self._last_first
        return buffer

    patch.setattr(bucket_exchange.Gathering, "_incoming", in_order)


def bucket_slot_lent_twice(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A partial arrives where another one has not been added yet."""
    incoming = bucket_exchange.Reduction._incoming

    def free_at_once(self, position, piece):
        buffer = incoming(self, position, piece)
        self._free.extend(slot for slot in self._arriving if slot not in self._free)
        return buffer

    patch.setattr(bucket_exchange.Reduction, "_incoming", free_at_once)


def own_gradient_first(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The same sum but for rounding."""
    add = bucket_exchange.Reduction._add

    def own_too(self, position, piece):
        add(self, position, piece)
        if position == 0:
            own = self.bucket[self._place(piece)]
            self._sum_of(piece).add_(own)
            own.zero_()

    patch.setattr(bucket_exchange.Reduction, "_add", own_too)


MUTANTS: list[tuple[str, Mutation]] = [
    ("gather: two steps swapped", of_plan("gather", swapped(1, 2))),
    ("gather: own block not first", of_plan("gather", swapped(0, 1))),
    ("scatter: two steps swapped", of_plan("reduce_scatter", swapped(0, 1))),
    ("scatter: own block not last", of_plan("reduce_scatter", swapped(-1, -2))),
    ("gather: last transfer dropped", of_plan("gather", last_transfer_dropped)),
    ("scatter: last transfer dropped", of_plan("reduce_scatter", last_transfer_dropped)),
    ("gather: one rank drops it", of_plan("gather", a_transfer_of_one_rank_dropped)),
    ("a block added twice", added_twice),
    ("another order of additions", other_order_of_additions),
    ("used before it arrives", used_before_it_arrives),
    ("overwritten before it is sent", overwritten_before_it_is_sent),
    ("one slot for all receives", shared_receive_slot),
    ("weight gradient of fewer rows", no_wgrad_of_what_arrived_last),
    ("everything times 1.001", scaled_a_little),
    ("a bucket's slot lent twice", bucket_slot_lent_twice),
    ("own gradient first", own_gradient_first),
    ("chunks of a bucket mixed up", last_chunk_first_for_receivers_only),
]


def under_test(rank: int, name: str | None) -> None:
    """What the other files run, in small: a gather, a sum, layers and buckets, fp32 and bf16."""
    link = transport.Transport.create(lanes=2, timeout=PATIENT)
    if name is not None:
        link.timeout = BRIEF  # a fault may be that a transfer never comes
    plant = dict(MUTANTS).get(name, lambda patch, rank: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_pipeline, "transport", lambda batched: link)
        patch.setattr(test_linear, "transport", lambda batched=False: link)
        plant(patch, rank)
        schedule = Schedule(lanes=2, chunks=3)
        for dtype in (torch.float32, torch.bfloat16):
            for keep in (False, True):
                test_pipeline.gather(rank, False, schedule, dtype, keep)
            test_pipeline.reduce(rank, False, schedule, dtype, False)
            for op in (test_linear.COLUMN, test_linear.ROW):
                case = test_linear.Case(
                    op, (24, 2, 32), dtype=dtype, options=LinearOptions(schedule)
                )
                test_linear.check_bits(rank, [case])
                test_linear.check_single(rank, [replace(case, ones=True)], exact=True)
            options = BucketOptions(schedule, scratch_bytes=0)
            test_buckets.check_sum(rank, link, options, 64, dtype)
            # As many elements in every chunk: a message that is too long would end the process.
            test_buckets.check_gather(rank, link, options, 63, dtype)


def test_without_a_fault_it_passes(ranks) -> None:
    ranks(3).run(under_test, None)


IN_SHORT = {
    "gather: own block not first",
    "scatter: last transfer dropped",
    "other order of additions",
    "overwritten before it is sent",
    "everything times 1.001",
    "a bucket's slot lent twice",
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
