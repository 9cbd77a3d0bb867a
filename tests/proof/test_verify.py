"""The verifier proves what is built and refutes what is broken, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import Piece, Plan, PlanError, Schedule, Step
from commfuse_npu.proof.verify import counter_examples, rendezvous, verify

KINDS = (
    ("gather", None),
    ("reduce_scatter", None),
    ("all_to_all", "first"),
    ("all_to_all", "last"),
)


def long(*sizes: int) -> list[Any]:
    return [pytest.param(size, marks=pytest.mark.long) for size in sizes]


def plans(schedule: Schedule, kind: str, size: int, own: str | None = None) -> list[Plan]:
    return [schedule.plan(kind, rank, size, own) for rank in range(size)]


def nodes(size: int) -> list[int]:
    return [node for node in range(1, size + 1) if size % node == 0]


def schedules(size: int, lanes: int, chunks: int) -> Iterator[Schedule]:
    for order in ("block", "interleaved"):
        yield Schedule("shifted", lanes, chunks, order)
        yield Schedule("ring", lanes, chunks, order)
        yield Schedule("shifted", lanes, chunks, order, taper=1.5)
        for node in nodes(size):
            yield Schedule("two_level", lanes, chunks, order, node)


@pytest.mark.parametrize("size", [*range(1, 6), *long(6, 7, 8)])
def test_small_groups_hold_for_every_option_and_never_wait_in_a_circle(size: int) -> None:
    for lanes, chunks in product((1, 2, 3, 7), (1, 2, 3)):
        for schedule in schedules(size, lanes, chunks):
            for kind, own in KINDS:
                group = plans(schedule, kind, size, own)
                verify(group)
                if lanes in (1, 2, 7) and chunks < 3:
                    for cold, batched in product((False, True), repeat=2):
                        assert rendezvous([group], cold=cold, batched=batched) is None


@pytest.mark.parametrize("size", [*range(9, 17), *long(*range(17, 33), 35, 40, 47, 48, 56, 63, 64)])
def test_groups_up_to_64_ranks_hold(size: int) -> None:
    """Lanes and chunks vary with the size; `commfuse-npu verify --max-ranks 64` takes them all."""
    lanes, chunks = 1 + size % 8, 1 + size % 3
    node = max(node for node in nodes(size) if node <= 8)
    for schedule in (
        Schedule("shifted", lanes, chunks),
        Schedule("shifted", size - 1, 1, "block"),
        Schedule("two_level", lanes, 1, node_size=node),
    ):
        for kind, own in KINDS:
            verify(plans(schedule, kind, size, own))
    for kind in ("gather", "reduce_scatter"):
        verify(plans(Schedule("ring", 1, chunks), kind, size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_operations_may_follow_each_other_on_the_same_lanes(size: int) -> None:
    """The backward of a column-parallel linear: a re-gather, then a reduce-scatter."""
    for lanes, chunks in product((1, 2, 3), (1, 2)):
        schedule = Schedule("shifted", lanes, chunks)
        sets = [plans(schedule, "gather", size), plans(schedule, "reduce_scatter", size)]
        for cold, batched in product((False, True), repeat=2):
            assert rendezvous(sets, cold=cold, batched=batched) is None


def mutated(plan: Plan, *changes: tuple[int, dict[str, object]]) -> Plan:
    steps = list(plan.steps)
    for index, change in changes:
        steps[index] = replace(steps[index], **change)
    return replace(plan, steps=tuple(steps))


def swap_posting_order(group: list[Plan]) -> list[Plan]:
    """Rank 0 posts two of its transfers in the other order."""
    a, b = group[0].steps[0], group[0].steps[1]
    first = {"send": b.send, "receive": b.receive}
    second = {"send": a.send, "receive": a.receive}
    return [mutated(group[0], (0, first), (1, second)), *group[1:]]


def drop_a_send(group: list[Plan]) -> list[Plan]:
    return [mutated(group[0], (0, {"send": None})), *group[1:]]


def drop_a_transfer_at_both_ends(group: list[Plan]) -> list[Plan]:
    target = group[0].steps[0].send.target
    group = list(group)
    group[0] = mutated(group[0], (0, {"send": None}))
    group[target] = mutated(group[target], (0, {"receive": None}))
    return group


def send_a_block_twice(group: list[Plan]) -> list[Plan]:
    """Every rank sends its first block again in the second step, instead of to the next peer."""
    changed = []
    for plan in group:
        first, second = plan.steps[0], plan.steps[1]
        again = {
            "send": first.send._replace(step=1),
            "receive": first.receive._replace(step=1),
        }
        changed.append(mutated(plan, (1, again), (1, {"compute": second.compute} | again)))
    return changed


def own_block_in_the_wrong_place(group: list[Plan]) -> list[Plan]:
    last = len(group[0].steps) - 1
    return [
        mutated(
            plan,
            (0, {"compute": plan.steps[last].compute}),
            (last, {"compute": plan.steps[0].compute}),
        )
        for plan in group
    ]


def another_lane_at_one_end(group: list[Plan]) -> list[Plan]:
    send = group[0].steps[0].send
    return [mutated(group[0], (0, {"send": send._replace(lane=1 - send.lane)})), *group[1:]]


def two_computed_pieces_swapped(group: list[Plan]) -> list[Plan]:
    one, two = group[0].steps[1].compute, group[0].steps[2].compute
    return [mutated(group[0], (1, {"compute": two}), (2, {"compute": one})), *group[1:]]


def send_to_oneself(group: list[Plan]) -> list[Plan]:
    send = group[0].steps[0].send
    return [mutated(group[0], (0, {"send": send._replace(target=0)})), *group[1:]]


FAULTS = [
    (swap_posting_order, "deadlock .*rank 0 waits on lane 0 to send"),
    (drop_a_send, "rank 1 expects block 0 chunk 0 from rank 0 .*which rank 0 does not send"),
    (drop_a_transfer_at_both_ends, "rank 1 never gets the part of rank 0 of block 0 chunk 0"),
    (send_a_block_twice, "gets the part of rank . of block . chunk 0 2 times instead of once"),
    (own_block_in_the_wrong_place, "instead of its own block: that transfer has nothing to hide"),
    (another_lane_at_one_end, "on lane 1, which rank 1 does not receive there"),
    (
        two_computed_pieces_swapped,
        "rank 0 computes block 2 chunk 0 in step 1, but the step before brings block 3 chunk 0",
    ),
    (send_to_oneself, "rank 0 transfers to itself"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_planted_faults_are_found(fault, words: str) -> None:
    # One lane and three ranks for the swap: on two lanes, or among four, it stays harmless.
    swap = fault is swap_posting_order
    group = plans(Schedule(lanes=1 if swap else 2), "gather", 3 if swap else 4)
    assert counter_examples(group) == []
    with pytest.raises(PlanError, match=words):
        verify(fault(group))


def test_a_partial_that_is_added_twice_is_found() -> None:
    group = plans(Schedule(), "reduce_scatter", 3)
    send, receive = group[0].steps[1].send, group[1].steps[1].receive
    made = {"compute": group[0].steps[0].compute}
    group[0] = mutated(group[0], (1, made), (2, {"send": send._replace(step=2)}))
    group[1] = mutated(group[1], (2, {"receive": receive._replace(step=2)}))
    with pytest.raises(PlanError, match=r"rank 1 gets the part of rank 0 of .* 2 times"):
        verify(group)


def sends_and_receives_on_two_lanes(group: list[Plan]) -> list[Plan]:
    """Both ends agree, but a rank's batch would have to be on two lanes at once."""
    changed = []
    for plan in group:
        send = plan.steps[0].send._replace(lane=plan.rank % 2)
        receive = plan.steps[0].receive._replace(lane=(plan.rank - 1) % 4 % 2)
        changed.append(mutated(plan, (0, {"send": send, "receive": receive})))
    return changed


def computed_a_step_late(group: list[Plan]) -> list[Plan]:
    late = []
    for plan in group:
        one, two = plan.steps[1].compute, plan.steps[2].compute
        late.append(mutated(plan, (1, {"compute": two}), (2, {"compute": one})))
    return late


def made_in_another_order(group: list[Plan]) -> list[Plan]:
    made = []
    for plan in group:
        one, two = plan.steps[0].compute, plan.steps[1].compute
        made.append(mutated(plan, (0, {"compute": two}), (1, {"compute": one})))
    return made


def receive_only(group: list[Plan]) -> list[Plan]:
    return [mutated(group[0], (1, {"send": None})), *group[1:]]


def a_chunk_that_does_not_exist(group: list[Plan]) -> list[Plan]:
    changed = []
    for plan in group:
        send, receive = plan.steps[0].send, plan.steps[0].receive
        extra = {
            "send": send._replace(piece=send.piece._replace(chunk=9)),
            "receive": receive._replace(piece=receive.piece._replace(chunk=9)),
        }
        changed.append(mutated(plan, (0, extra)))
    return changed


def added_in_another_order(group: list[Plan]) -> list[Plan]:
    """Every rank starts with the distance 3: complete and in one order, but other bits."""
    size = len(group)
    changed = []
    for plan in group:
        steps = list(plan.steps)
        for place, distance in enumerate((3, 1, 2)):
            piece = Piece(None, (plan.rank + distance) % size, 0)
            steps[place] = replace(steps[place], compute=piece)
            after = steps[place + 1]
            steps[place + 1] = replace(
                after,
                send=after.send._replace(target=piece.target, piece=piece),
                receive=after.receive._replace(source=(plan.rank - distance) % size),
            )
        changed.append(replace(plan, steps=tuple(steps)))
    return changed


@pytest.mark.parametrize(
    ("kind", "own", "shape", "fault", "words"),
    [
        ("gather", None, "shifted", sends_and_receives_on_two_lanes, "posted as one batch"),
        ("all_to_all", "first", "ring", computed_a_step_late, "but the step before brings"),
        ("reduce_scatter", None, "shifted", made_in_another_order, "where it has to send"),
        ("reduce_scatter", None, "shifted", receive_only, "has a receive only"),
        ("gather", None, "shifted", a_chunk_that_does_not_exist, "a block has 1 chunks only"),
        ("reduce_scatter", None, "shifted", added_in_another_order, "other bits than the coll"),
    ],
)
def test_plans_that_the_pipelines_would_miscarry_are_found(kind, own, shape, fault, words) -> None:
    """In these, data and order are right, but the transport or a pipeline assumes more."""
    group = plans(Schedule(shape, lanes=2), kind, 4, own)
    assert counter_examples(group) == []
    assert any(words in line for line in counter_examples(fault(group), limit=99))


def test_a_ring_with_everyone_sending_first_is_a_deadlock() -> None:
    """The classical fault: single operations, sends before receives, one lane."""
    group = plans(Schedule("ring", 1), "gather", 3)
    group = [replace(plan, steps=tuple(_send_first(plan))) for plan in group]
    found = rendezvous([group], batched=False)
    assert found is not None
    assert found.startswith("deadlock (warm): rank 0 waits on lane 0 to send")
    assert "and so round to rank 0" in found


def _send_first(plan: Plan) -> Iterator[Step]:
    for step in plan.steps:
        yield replace(step, receive=None)
        yield replace(step, send=None, compute=None)


def test_a_group_has_to_be_whole_and_of_one_kind() -> None:
    group = plans(Schedule(), "gather", 3)
    assert "2 plans were given for a group of 3" in counter_examples(group[:2])[0]
    assert "the plan in place 0 is that of rank 1" in counter_examples(group[::-1][1:] + group)[1]
    mixed = [*group[:2], Schedule(chunks=2).plan("gather", 2, 3)]
    assert "rank 2 plans a gather (shifted, 2 lanes, 2 chunks" in counter_examples(mixed)[0]
    assert counter_examples([]) == ["there are no plans; give one per rank"]


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(2, 6),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(["shifted", "ring"]),
    lanes=st.integers(1, 4),
    chunks=st.integers(1, 3),
    data=st.data(),
)
def test_any_single_change_of_a_transfer_is_found(size, kind, shape, lanes, chunks, data) -> None:
    """Whatever field of whatever transfer of one rank is changed, the plans no longer hold."""
    group = plans(Schedule(shape, lanes, chunks), kind[0], size, kind[1])
    rank = data.draw(st.integers(0, size - 1))
    plan = group[rank]
    index = data.draw(st.sampled_from([step.index for step in plan.transfers]))
    end = data.draw(st.sampled_from(["send", "receive"]))
    transfer = getattr(plan.steps[index], end)
    field = data.draw(st.sampled_from(["step", "lane", "source", "target", "piece", "gone"]))
    if field == "gone":
        changed = None
    elif field == "piece":
        chunk = (transfer.piece.chunk + 1) % (chunks + 1)
        changed = transfer._replace(piece=transfer.piece._replace(chunk=chunk))
    else:
        changed = transfer._replace(**{field: getattr(transfer, field) + 1})
    group[rank] = mutated(plan, (index, {end: changed}))
    assert counter_examples(group)
