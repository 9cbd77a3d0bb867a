"""A forward and a backward that are interleaved: conservation, closed forms, order."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.plan.turn_order import strict_turns
from commfuse_npu.tools.simulate import fb_overlap, llama
from commfuse_npu.tools.simulate.group import Group, Simulated
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import side_by_side
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, MEGATRON
from tests.tools.simulate.machines import ideal
from tests.tools.simulate.timeline_checks import sent, work

SHAPE = LayerShape(1024, 1024, 1, 512, 1024, 768, 4096, 4)
RATE = 0.002
"""Rate of the links: a transfer takes a fifth of the largest GEMM, at 1 FLOP/s."""


def simulated(*, recomputes: bool = False, rate: float = RATE) -> Simulated:
    return Group(ideal(rate=rate), 4).simulate(
        FB_OVERLAP, lambda rank: fb_overlap.pair(rank, SHAPE, 2, recomputes=recomputes)
    )


def in_order(*, recomputes: bool = False) -> Simulated:
    def build(rank: Rank) -> None:
        for _ in range(2):
            llama.forward(rank, SHAPE)
        for _ in range(2):
            if recomputes:
                llama.forward(rank, SHAPE)
            llama.backward(rank, SHAPE)

    return Group(ideal(rate=RATE), 4).simulate(MEGATRON, build)


@pytest.mark.parametrize("recomputes", [False, True])
def test_it_launches_what_megatron_launches_and_hand_overs(recomputes: bool) -> None:
    ours, plain = (
        Counter((op.name, op.seconds, sent([op])) for op in run.launches[0] if op.name != "end")
        for run in (simulated(recomputes=recomputes), in_order(recomputes=recomputes))
    )
    assert 0 < ours.pop(("hand over", 0.0, 0)) <= 2 * plain.total()
    assert ours == plain


def test_it_is_shorter_than_strict_turns_and_longer_than_its_work() -> None:
    pair, plain = simulated(), in_order()
    # Without a hand-over each side waits as in Megatron's order.
    never = lambda sides: tuple((False,) * len(side) for side in sides)  # noqa: E731
    with mock.patch.object(fb_overlap, "best_order", never):
        assert simulated().timeline.seconds == pytest.approx(plain.timeline.seconds, rel=1e-6)
    with mock.patch.object(fb_overlap, "best_order", strict_turns):
        assert pair.seconds < simulated().seconds < plain.seconds
    # Without transfers only the work is left.
    free = simulated(rate=1e9)
    assert work(pair) == work(free) == pytest.approx(free.seconds, rel=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_step_of_equal_stages(stages: int, micro_batches: int) -> None:
    """``(m - 1)`` pairs and ``p`` forwards and backwards, if there are enough pairs."""
    forward, backward, pair = 1.0, 2.0, 2.5
    each = [[value] * stages for value in (forward, backward, pair)]
    ends = side_by_side(*each, micro_batches, 0.0, 1)
    if micro_batches >= 2 * stages:
        expected = (micro_batches - 1) * pair + stages * (forward + backward)
        assert max(ends) == pytest.approx(expected)
    assert max(ends) >= micro_batches * pair
    assert ends == sorted(ends, reverse=True)


def test_a_virtual_pipeline_runs_each_chunk_of_each_micro_batch() -> None:
    stages, chunks, micro_batches = 2, 2, 8
    ones = [1.0] * stages * chunks
    overlapped = side_by_side(ones, ones, ones, micro_batches, 0.0, chunks)
    in_turn = side_by_side(ones, ones, [2.0] * stages * chunks, micro_batches, 0.0, chunks)
    paired, _ = paired_microbatches(slots(stages, 0, chunks, micro_batches))
    assert max(in_turn) - max(overlapped) >= paired
    # The first stage waits for a slow second one.
    slow = [1.0, 3.0, 1.0, 1.0] * chunks
    ends = side_by_side(slow, slow, [2 * time for time in slow], micro_batches, 0.0, chunks)
    assert ends == sorted(ends, reverse=True)
    # Transfers between stages come after every slot.
    late = side_by_side(ones, ones, ones, micro_batches, 0.25, chunks)
    count = len(slots(stages, 0, chunks, micro_batches))
    assert max(overlapped) < max(late) <= max(overlapped) + 0.25 * count
