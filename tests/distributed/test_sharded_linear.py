"""The fully sharded linear layer: orders, memory, errors and planted faults.

Its bits are compared in :mod:`tests.random_networks`.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch

from commfuse_npu.ops import ShardedOptions, sharded_linear
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import sharded_backward
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks.case import one_layer
from tests.random_networks.network_run import Call, input_of

# The package exports the function of this name.
module = import_module("commfuse_npu.ops.sharded_linear")


def order_of_backward(rank: int, batched: bool) -> tuple[bool, list[str]]:
    """How it posts; posts and waits of the weight's blocks and of its gradient's, and the work."""
    lanes = 1 if batched else 2
    link = Transport.create(lanes=lanes, timeout=PATIENT, batched=batched)
    options = ShardedOptions(Schedule(lanes=lanes))
    x = torch.ones(4, 8, requires_grad=True)
    shard = torch.ones(4, 8, requires_grad=True)
    y = sharded_linear(x, shard, transport=link, options=options)
    events: list[str] = []

    def what(transfer: Any) -> str:
        return "weight" if transfer.piece.startswith("block") else "wgrad"

    with pytest.MonkeyPatch.context() as patch:

        def posted(self: Running, one: Any) -> None:
            for verb, end in (("receive", one.receive), ("send", one.send)):
                if end is not None:
                    events.append(f"{verb} {what(end.transfer)}")

        def waits(self: Running, receives: tuple[int, ...], *_: Any) -> None:
            events.extend(f"wait {what(self.program.transfers[step][1])}" for step in receives)

        watch_posts(patch, posted)
        watch_calls(patch, Running, "_wait", waits)
        watch_calls(patch, module, "wgrad_into", lambda *_: events.append("make"))
        watch_calls(patch, module, "add_dgrad", lambda *_: events.append("dgrad"))
        y.sum().backward()
    return link.batched, events


def test_both_exchanges_of_the_backward_are_covered(ranks) -> None:
    for batched, events in ranks(3).run(order_of_backward, False):
        assert [event for event in events if not event.startswith("receive")] == [
            # The weight is on its way before work begins, every wgrad block leaves as it is made.
            *("send weight", "send weight"),
            *("make", "send wgrad", "make", "send wgrad", "make"),
            # The own block of the weight needs no wait; the sums come behind all dgrad blocks.
            *("dgrad", "wait weight", "dgrad", "wait weight", "dgrad"),
            *("wait wgrad", "wait wgrad"),
        ]
        assert events.count("receive weight") == events.count("receive wgrad") == 2
        # By themselves receives are posted as soon as they have memory, in front of all work.
        first = events.index("make")
        assert batched or events[:first].count("receive wgrad") == 2


def test_backward_in_batches_takes_turns_on_the_lane(ranks) -> None:
    """In-order lanes: no more of the weight than two blocks, until the own block is used."""
    for _, events in ranks(4).run(order_of_backward, True):
        sends = [event.removeprefix("send ") for event in events if event.startswith("send")]
        assert sends == ["weight", "weight", "wgrad", "wgrad", "wgrad", "weight"]


@on_ranks(2)
def test_frozen_weights_and_inputs_without_gradient_transfer_nothing(rank: int) -> None:
    """What a backward sends."""
    found = []
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
        found.append(sent)
    assert found == [{"block", "partial"}, {"block"}, {"partial"}, set()]


@pytest.mark.parametrize("batched", [False, True])
def test_the_whole_weight_exists_nowhere(batched: bool) -> None:
    """Of 64 blocks of 128 rows two have memory, or a piece more than there are lanes."""
    for schedule, arriving, leaving in (
        (Schedule(lanes=1), 256, 256),
        (Schedule(lanes=1, chunks=4), 256, 256),
        (Schedule(lanes=5), 6 * 128, 6 * 128),
        # Chunks of 80, 32 and 16 rows, in two stacks of two pieces.
        (Schedule(lanes=2, chunks=3, taper=2.0), 3 * 80, 4 * 80),
    ):
        program = sharded_backward(Place(schedule, 5, 64, batched), 128, 16, True, True)
        slots: dict[str, int] = {}
        for one in program.scratch:
            slots[one.slot] = max(slots.get(one.slot, 0), one.rows)
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
