"""Plans: the timelines of the documentation, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commfuse_npu.plan import Order, Piece, PlanError, Schedule, split, taper_down


def computed(schedule: Schedule, kind: str, rank: int, size: int, **options: str) -> list[int]:
    plan = schedule.plan(kind, rank, size, **options)
    return [plan.block(step.compute) for step in plan.steps if step.compute]


def test_gather_takes_the_own_block_first_then_the_nearest() -> None:
    plan = Schedule(lanes=3).plan("gather", 1, 4)
    assert computed(Schedule(), "gather", 1, 4) == [1, 0, 3, 2]
    assert [step.receive.source for step in plan.transfers] == [0, 3, 2]
    assert [step.send.target for step in plan.transfers] == [2, 3, 0]
    assert plan.steps[0].compute == Piece(1, None, None)
    assert [step.index for step in plan.transfers] == [0, 1, 2]


def test_scatter_makes_the_own_block_last() -> None:
    plan = Schedule().plan("reduce_scatter", 1, 4)
    assert computed(Schedule(), "reduce_scatter", 1, 4) == [2, 3, 0, 1]
    assert [step.send.target for step in plan.transfers] == [2, 3, 0]
    # Partials arrive, and are added, in the order r-1, ..., r+1.
    assert [step.receive.source for step in plan.transfers] == [0, 3, 2]
    assert [step.index for step in plan.transfers] == [1, 2, 3]


def test_all_to_all_is_both() -> None:
    assert computed(Schedule(), "all_to_all", 2, 4, own="last") == [3, 0, 1, 2]
    assert computed(Schedule(), "all_to_all", 2, 4, own="first") == [2, 1, 0, 3]


def test_ring_talks_to_neighbours_only() -> None:
    for kind, up in (("gather", True), ("reduce_scatter", False), ("all_to_all", True)):
        for step in Schedule("ring", chunks=2).plan(kind, 0, 5).transfers:
            there, back = (1, 4) if up else (4, 1)
            assert (step.send.target, step.receive.source) == (there, back)


def test_two_level_keeps_to_the_node_while_it_can() -> None:
    nodes = Schedule("two_level", node_size=2)
    assert computed(nodes, "gather", 0, 6) == [0, 1, 4, 5, 2, 3]
    # The mirror image: the far blocks, whose links are slow, are made and sent first.
    assert computed(nodes, "reduce_scatter", 0, 6) == [2, 3, 4, 5, 1, 0]
    lanes = {(t.send.target, t.send.lane) for t in nodes.plan("gather", 0, 6).transfers}
    assert lanes == {(1, 0), (2, 1), (3, 1), (4, 1), (5, 1)}


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("block", [(2, 0), (2, 1), (1, 0), (1, 1)]),
        ("interleaved", [(2, 0), (1, 0), (2, 1), (1, 1)]),
    ],
)
def test_order_over_peers_and_chunks(order: str, expected: list[tuple[int, int]]) -> None:
    plan = Schedule(chunks=2, order=order).plan("gather", 0, 3)
    got = [(step.compute.source, step.compute.chunk) for step in plan.steps[1:]]
    assert got == expected


def test_a_pair_of_ranks_always_meets_on_the_same_lane() -> None:
    for shape in ("shifted", "two_level"):
        node = 3 if shape == "two_level" else None
        plan = Schedule(shape, lanes=2, chunks=4, node_size=node).plan("gather", 0, 6)
        lanes: dict[int, set[int]] = {}
        for step in plan.transfers:
            lanes.setdefault(step.send.target, set()).add(step.send.lane)
        assert all(len(used) == 1 for used in lanes.values())
        assert len(set.union(*lanes.values())) == 2


def test_rows_of_pieces_cover_the_tensor_once() -> None:
    for kind in ("gather", "reduce_scatter", "all_to_all"):
        for rows in (3, 7, 8):
            plan = Schedule(chunks=3).plan(kind, 2, 5)
            seen = sorted(
                row for run in plan.computed_rows(rows) for row in range(run.start, run.stop)
            )
            assert seen == list(range(5 * rows))


def test_split_is_even() -> None:
    assert split(7, 3) == (0, 2, 4, 7)
    assert split(2, 4) == (0, 0, 1, 1, 2)


def test_tapered_pieces_shrink_where_they_arrive_and_grow_where_they_are_made() -> None:
    schedule = Schedule(chunks=4, taper=2)
    gather, scatter = (schedule.plan(kind, 0, 2) for kind in ("gather", "reduce_scatter"))
    down = [run.stop - run.start for run in gather.computed_rows(1920)]
    assert down == [1920, 1024, 512, 256, 128], "the own block first, never cut"
    assert [run.stop - run.start for run in scatter.computed_rows(1920)] == [
        128, 256, 512, 1024, 1920
    ]  # fmt: skip


@given(rows=st.integers(1, 3000), parts=st.integers(1, 9), taper=st.floats(1.01, 8), own_first=...)
def test_tapered_pieces_cover_a_block_once_and_none_is_empty(
    rows: int, parts: int, taper: float, own_first: bool
) -> None:
    bounds = taper_down(rows, parts, taper)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, rows, parts)
    assert all(size >= 0 for size in sizes)
    if rows >= parts:
        assert min(sizes) >= 1
    if rows % 16 == 0 and rows >= 16 * parts:
        assert all(size % 16 == 0 for size in sizes)
    plan = Schedule(chunks=parts, taper=taper).plan(
        "all_to_all", 1, 3, "first" if own_first else "last"
    )
    seen = sorted(row for run in plan.computed_rows(rows) for row in range(run.start, run.stop))
    assert seen == list(range(3 * rows))


@given(
    size=st.integers(2, 9), lanes=st.integers(1, 8), chunks=st.integers(1, 8),
    taper=st.floats(1, 8),
)  # fmt: skip
def test_scratch_of_tapered_pieces_is_two_blocks_at_most(
    size: int, lanes: int, chunks: int, taper: float
) -> None:
    rows = 1 << 20
    for kind in ("gather", "reduce_scatter"):
        plan = Schedule(lanes=lanes, chunks=chunks, taper=taper).plan(kind, 0, size)
        slots = [plan.slot_rows(slot, rows) for slot in range(plan.window)]
        longest = max(slots)
        assert sum(slots) <= max(2 * rows, (lanes + 1) * longest) + len(slots) * 16


@pytest.mark.parametrize("taper", [0.5, 0, -1, 9, float("nan")])
def test_a_taper_out_of_range_is_refused(taper: float) -> None:
    with pytest.raises(PlanError, match=f"taper is {taper}; from 1 .* to 8"):
        Schedule(chunks=2, taper=taper)


def test_scratch_memory_is_bounded_by_two_blocks_or_the_lanes() -> None:
    for chunks in (1, 2, 4):
        for lanes in (1, 2, 7):
            plan = Schedule(lanes=lanes, chunks=chunks).plan("reduce_scatter", 0, 8)
            assert plan.window <= max(2 * chunks, lanes + 1)


@given(
    size=st.integers(2, 9), lanes=st.integers(1, 4), chunks=st.integers(1, 8),
    taper=st.floats(1, 8), order=st.sampled_from(("block", "interleaved")),
)  # fmt: skip
def test_what_a_ring_carries_is_sent_before_its_slot_is_used_again(
    size: int, lanes: int, chunks: int, taper: float, order: Order
) -> None:
    plan = Schedule("ring", lanes, chunks, order, taper=taper).plan("reduce_scatter", 0, size)
    sent = {step.send.piece: place for place, step in enumerate(plan.transfers)}
    for piece, arrived in plan.arrival.items():
        assert sent.get(piece, arrived) - arrived <= plan.window


def test_group_of_one_computes_and_sends_nothing() -> None:
    for kind in ("gather", "reduce_scatter", "all_to_all"):
        plan = Schedule("ring", chunks=4).plan(kind, 0, 1)
        assert len(plan.steps) == 1
        assert not plan.transfers


def test_plans_are_immutable_and_built_once() -> None:
    plan = Schedule().plan("gather", 0, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rank = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps[0].compute = None
    assert Schedule().plan("gather", 0, 4) is plan


def test_drawing_names_every_step() -> None:
    drawing = Schedule(chunks=2).plan("reduce_scatter", 0, 3).draw()
    assert "partial for 1 chunk 0 -> rank 1" in drawing
    assert len(drawing.splitlines()) == 2 + 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "mesh"}, "shape 'mesh' is unknown; choose one of shifted, ring, two_level"),
        ({"order": "peer"}, "order 'peer' is unknown"),
        ({"lanes": 0}, "lanes is 0; it must be a whole number from 1"),
        ({"chunks": 1.5}, "chunks is 1.5; it must be a whole number from 1"),
        ({"chunks": True}, "chunks is True"),
        ({"shape": "two_level"}, "two_level needs node_size"),
        ({"node_size": 2}, "node_size 2 has no meaning for the shape 'shifted'"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule(**options)


@pytest.mark.parametrize(
    ("kind", "rank", "size", "own", "message"),
    [
        ("gathr", 0, 2, None, "kind 'gathr' is unknown"),
        ("gather", 4, 4, None, "rank 4 is outside a group of size 4"),
        ("gather", 0, 0, None, "rank 0 is outside a group of size 0"),
        ("gather", 0, 2, "last", "gather computes the own block first"),
        ("all_to_all", 0, 2, "middle", "own 'middle' is unknown"),
    ],
)
def test_bad_places_are_named(
    kind: str, rank: int, size: int, own: str | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule().plan(kind, rank, size, own)


def test_nodes_have_to_be_whole() -> None:
    with pytest.raises(PlanError, match="group size 6 is not a multiple of node_size 4"):
        Schedule("two_level", node_size=4).plan("gather", 0, 6)


def test_plan_and_proof_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from commfuse_npu.plan import Schedule\n"
        "from commfuse_npu.proof import verify, verify_log\n"
        "verify.verify([Schedule().plan('gather', r, 2) for r in range(2)])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
