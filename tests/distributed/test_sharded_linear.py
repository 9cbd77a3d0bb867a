"""The fully sharded linear layer: transfers of its backward, and memory.

Its results are compared in :mod:`tests.random_networks`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import sharded_backward
from commfuse_npu.plan.schedule import RankSpec
from tests.distributed.programs import watch_posts
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import one_layer
from tests.random_networks.network_run import Call, input_of


@on_ranks(2)
def test_frozen_weights_and_inputs_without_gradient_transfer_nothing(rank: int) -> None:
    """The kinds of pieces that a backward sends."""
    pieces = []
    for x_grad, weight_grad in ((True, True), (True, False), (False, True), (False, False)):
        case = one_layer("sharded_linear", 2, x_grad=x_grad, weight_grad=weight_grad)
        y = Call(case)(input_of(case))
        sent: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:

            def logged(self: Any, one: Any, sent: set[str] = sent) -> None:
                if one.send is not None:
                    sent.add(one.send.transfer.piece.split()[0])

            watch_posts(patch, logged)
            y.backward(torch.ones_like(y))
        pieces.append(sent)
    assert pieces == [{"block", "partial"}, {"block"}, {"partial"}, set()]


@pytest.mark.parametrize("batched", [False, True])
def test_the_whole_weight_exists_nowhere(batched: bool) -> None:
    """Of 64 blocks of 128 rows, memory holds two, or one piece more than there are lanes."""
    for schedule, arriving, leaving in (
        (Schedule(lanes=1), 256, 256),
        (Schedule(lanes=1, chunks=4), 256, 256),
        (Schedule(lanes=5), 6 * 128, 6 * 128),
        # Chunks of 80, 32 and 16 rows, in two stacks of two pieces.
        (Schedule(lanes=2, chunks=3, taper=2.0), 3 * 80, 4 * 80),
    ):
        program = sharded_backward(RankSpec(schedule, 5, 64, batched), 128, 16, True, True)
        slots: dict[str, int] = {}
        for buffer in program.scratch:
            slots[buffer.slot] = max(slots.get(buffer.slot, 0), buffer.rows)
        rows: Counter[str] = Counter()
        for slot, length in slots.items():
            rows[slot.split()[0]] += length
        assert rows == {
            "arriving": arriving,
            "made": leaving,
            "partials": leaving,
            "own": 128,
            "total": 128,
        }
