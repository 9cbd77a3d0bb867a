"""Simple cases whose time has a closed form, and properties that have to follow."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import ITEM_BYTES, Level, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate import linear
from commfuse_npu.tools.simulate.group import Group, collective_seconds
from commfuse_npu.tools.simulate.launches import Links
from commfuse_npu.tools.simulate.mc2 import RANKS, tiling
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import MC2, REFERENCE, Variant
from tests.tools.simulate.machines import ideal, variants

ROWS = FEATURES = 840
"""Rows of a block, features of a layer's input and output; divisible by 1, 2, ..., 8."""
BLOCK = ROWS * FEATURES * ITEM_BYTES

few = settings(max_examples=20, deadline=None)
very_few = settings(max_examples=3, deadline=None)
times = st.floats(0.001, 1000.0)
chunks_ = st.integers(1, 8)


def fused(lanes: int, chunks: int = 1, *, rounded: bool = False) -> Variant:
    return Variant("fused", "fused", Schedule("shifted", lanes, chunks), rounded)


def layer(
    part: str, machine: Machine, size: int, variant: Variant, compute: float, block: float
) -> float:
    """Seconds of a part of a layer, where a GEMM over all rows takes ``compute`` seconds and the
    transfer of a block over a link of rate 1 takes ``block``.
    """
    flops = 2.0 * size * ROWS * FEATURES**2
    inside = replace(machine.inside, rate=machine.inside.rate * BLOCK / block)
    machine = replace(machine, cube_flops=flops / compute if compute else math.inf, inside=inside)
    build = getattr(linear, part)

    def add(rank: Rank) -> None:
        rest(build(rank, "x", ROWS, FEATURES, FEATURES) or iter(()))

    return Group(machine, size).simulate(variant, add).seconds


gather, scatter = partial(layer, "column"), partial(layer, "row")
column, row = partial(layer, "column_gradients"), partial(layer, "row_gradients")


both = pytest.mark.parametrize("operation", [gather, scatter], ids=["gather", "scatter"])


def gathered(c: float, t: float, size: int, chunks: int) -> float:
    """Expected time: the own block, then a GEMM per chunk of all peers; a lane for each peer."""
    part, ahead = c * (size - 1) / (size * chunks), max(1, 8 // (size - 1))
    ends, arrived = [c / size], 0.0
    for chunk in range(chunks):
        # Posted before the first work, or before the chunk that it follows is used.
        posted = 0.0 if chunk < ahead else ends[chunk - 1]
        arrived = max(arrived, posted) + t / chunks
        ends.append(max(ends[-1], arrived) + part)
    return ends[-1]


def scattered(c: float, t: float, size: int, chunks: int) -> float:
    """Expected time: groups of columns, two in flight; own rows of the last group come last."""
    time, arrivals = 0.0, [0.0]
    for group in range(chunks):
        if group >= 2:
            time = max(time, arrivals[group - 1])  # the group two before has to be summed first
        whole = time + c / chunks
        own = c / (size * chunks) if group == chunks - 1 else 0.0
        time = whole
        arrivals.append(max(arrivals[-1], whole - own) + t / chunks)
    return max(time, arrivals[-1])


@both
@few
@given(c=times, t=times, size=st.integers(2, 6), chunks=chunks_)
def test_chunks_of_all_peers_go_together(operation, c, t, size: int, chunks: int) -> None:
    expected = (gathered if operation is gather else scattered)(c, t, size, chunks)
    assert operation(ideal(), size, fused(size - 1, chunks), c, t) == pytest.approx(expected)


@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
@few
@given(c=times, t=times, size=st.integers(2, 6), latency=st.floats(0, 10))
def test_one_lane_is_one_transfer_after_the_other(topology, c, t, size: int, latency) -> None:
    # The first rank has all other blocks on one side, and multiplies them together.
    expected = max(c / size, (size - 1) * (t + latency)) + c * (size - 1) / size
    time = gather(ideal(topology, latency=latency), size, fused(1), c, t)
    assert time == pytest.approx(expected)


@both
@few
@given(c=times, t=times, size=st.integers(2, 6))
def test_plain_is_the_sum(operation, c: float, t: float, size: int) -> None:
    assert operation(ideal(), size, REFERENCE, c, t) == pytest.approx(c + t)
    late = operation(ideal("switched"), size, REFERENCE, c, t)
    assert late == pytest.approx(c + (size - 1) * t)


@both
@few
@given(c=times, t=times, slices=st.sampled_from([1, 2, 4, 8]))
def test_slices_leave_a_tail(operation, c: float, t: float, slices: int) -> None:
    variant = Variant("coc", "sliced", slices)
    expected = max(c, t) + min(c, t) / slices
    assert operation(ideal(), 4, variant, c, t) == pytest.approx(expected)


@few
@given(c=times, t=times, size=st.sampled_from([2, 4, 8]))
def test_mc2_goes_tile_by_tile(c: float, t: float, size: int) -> None:
    time, arrived = c / size, 0.0  # of the gather, the own block first
    for tile in tiling("gather", ROWS, FEATURES, FEATURES, size, 20).rows:
        arrived += t * tile / ROWS
        time = max(time, arrived) + c * (size - 1) / size * tile / ROWS
    assert gather(ideal(), size, MC2, c, t) == pytest.approx(time)
    assert gather(ideal(), 3, MC2, c, t) == pytest.approx(c + t), "which it has no form for"
    time = arrived = 0.0
    for tile in tiling("scatter", ROWS, FEATURES, FEATURES, size, 20).rows:
        time += c * tile / ROWS
        arrived = max(arrived, time) + t * tile / ROWS
    assert scatter(ideal(), size, MC2, c, t) == pytest.approx(arrived)


@few
@given(t=times, size=st.sampled_from([2, 4, 8, 16]))
def test_mc2_goes_around_a_ring_in_few_rounds(t: float, size: int) -> None:
    machine = ideal("switched", latency=1.0)
    tiles = tiling("gather", ROWS, FEATURES, FEATURES, size, 20, ring=True).rows
    expected = len(tiles) * min(4, size - 1) + (size - 1) * t
    assert gather(machine, size, MC2, 0.0, t) == pytest.approx(expected)


@few
@given(c=times, t=times)
def test_sums_in_an_order_make_a_mesh_scatter_longer(c: float, t: float) -> None:
    machine = ideal(ordered_sums=0.4)
    for size, longer in ((8, 1.4), (4, 1.2), (2, 1.1)):
        assert scatter(machine, size, REFERENCE, c, t) == pytest.approx(c + longer * t)
        assert gather(machine, size, REFERENCE, c, t) == pytest.approx(c + t)
        # CommFuse's sums have a fixed order anyway.
        ours = fused(size - 1, 4)
        assert scatter(machine, size, ours, c, t) == scatter(ideal(), size, ours, c, t)


@both
@very_few
@given(c=times, t=times, more=st.floats(1.0, 3.0), size=st.sampled_from([2, 4]))
def test_more_of_anything_never_takes_less_and_the_work_at_least(
    operation, c: float, t: float, more: float, size: int
) -> None:
    for variant in variants(size, max(1, size - 1)):
        time = operation(ideal(latency=0.1), size, variant, c, t) * (1 - 1e-9)
        assert operation(ideal(latency=0.1), size, variant, c * more, t) >= time, variant.name
        assert operation(ideal(rate=1 / more, latency=0.1), size, variant, c, t) >= time
        assert operation(ideal(latency=0.1 * more), size, variant, c, t) >= time, variant.name
        free = operation(ideal("switched", rate=math.inf), size, variant, c, t)
        assert free == pytest.approx(c), variant.name


@few
@given(c=times, t=st.floats(0.001, 0.4), slowdown=st.floats(0, 0.2))
def test_transfers_slow_the_work_that_hides_them(c: float, t: float, slowdown: float) -> None:
    machine = ideal(transfer_slowdown=slowdown)
    # While the transfer runs, for t * c seconds, this share of the speed is lost.
    assert gather(machine, 2, fused(1), c, t * c) == pytest.approx(c + slowdown * t * c)


def test_a_host_that_launches_slowly_is_what_is_waited_for() -> None:
    machine = ideal(rate=math.inf, launch_overhead=2.0, post_overhead=5.0)
    # Own block, other block: two launches, and a post.
    assert gather(machine, 2, fused(1), 0.0, 1.0) == pytest.approx(9.0)
    # A collective is a launch like any other.
    assert gather(machine, 2, REFERENCE, 0.0, 1.0) == pytest.approx(4.0)


def test_sums_and_copies_take_memory_traffic() -> None:
    machine, work, block = ideal(rate=math.inf, hbm_bandwidth=3.0), 1e8, BLOCK
    # Two partials and the own one: of each addition two are read, and the sum is written.
    ordered = scatter(machine, 3, fused(2), work, block)
    assert ordered == pytest.approx(work + 2 * 3 * block / 3)
    # In one pass all are read, and the sum is written once.
    single = scatter(machine, 3, fused(2, rounded=True), work, block)
    assert single == pytest.approx(work + 4 * block / 3)
    # The results of both peers are read and written, those of the last chunk with nothing beside;
    # blocks of one chunk arrive in place.
    copied = gather(machine, 3, fused(2, 2), work, block)
    assert copied == pytest.approx(work + 2 * 2 * block / 3 / 2)
    assert gather(machine, 3, fused(2), work, block) == pytest.approx(work)
    # Columns of a weight are copied before they are multiplied.
    unsplit, split = (column(machine, 2, fused(1, chunks), work, block) for chunks in (1, 2))
    assert split - unsplit == pytest.approx(2 * ITEM_BYTES * FEATURES**2 / 3, rel=1e-6)


def test_an_npu_has_a_nic_of_its_own() -> None:
    between = Level("nic_per_npu", 1.0, 0.0)
    machine = replace(ideal(rate=math.inf), npus_per_node=4, between=between)
    # Three peers in other nodes.
    assert collective_seconds(Group(machine, 4, stride=4), 2.0) == pytest.approx(6.0)
    # Both ranks of a node send to both ranks of the other node.
    machine = replace(machine, npus_per_node=2)
    assert collective_seconds(Group(machine, 4), 2.0) == pytest.approx(4.0)


# ------------------------------------------------------------------- a column's backward


@few
@given(c=times, t=times, chunks=chunks_)
def test_a_column_backward_overlaps_as_its_variant_says(c: float, t: float, chunks: int) -> None:
    # dgrad and wgrad take c each.
    assert column(ideal(), 4, REFERENCE, c, t) == pytest.approx(2 * (c + t))
    # Gathered during dgrad, scattered during wgrad.
    megatron = column(ideal(), 4, Variant("megatron", "megatron"), c, t)
    assert megatron == pytest.approx(2 * max(c, t))
    # One lane: the gather, then groups of columns of the whole dgrad, which wgrad hides.
    link = t
    for group in range(1, chunks + 1):
        link = max(link, group * c / chunks) + t / chunks
    whole = column(ideal(), 2, fused(1, chunks), c, t)
    assert whole == pytest.approx(max(max(c, t) + c, link))
    # By blocks the half of wgrad that needs no transfer hides the gather, too.
    blocks = column(ideal(), 2, fused(1, chunks, rounded=True), c, t)
    assert blocks == pytest.approx(max(max(1.5 * c, t) + c / 2, link))


@few
@given(c=times, t=times)
def test_a_row_backward_hides_its_gather_behind_what_it_may_compute(c: float, t: float) -> None:
    assert row(ideal(), 2, REFERENCE, c, t) == pytest.approx(t + 2 * c)
    assert row(ideal(), 2, fused(1), c, t) == pytest.approx(max(c / 2, t) + c / 2 + c)
    blocks = row(ideal(), 2, fused(1, rounded=True), c, t)
    assert blocks == pytest.approx(max(c, t) + c)


def test_a_weight_gradient_by_blocks_is_added_up_in_fp32() -> None:
    machine = ideal(rate=math.inf, hbm_bandwidth=1.0)
    whole, blocks = (row(machine, 2, fused(1, rounded=by), 0.0, BLOCK) for by in (False, True))
    # Both blocks read and write a sum of 4 bytes, one product of all rows writes 2.
    assert blocks - whole == pytest.approx((2 * 2 * 4 - 2) * FEATURES**2)


# ------------------------------------------------------------------- MC2's tiling


@pytest.mark.parametrize(
    ("kind", "rows", "inner", "outer", "ranks", "ring", "tiles"),
    [
        ("gather", 4096, 4096, 1536, 4, False, [1920, 2176]),
        ("gather", 2048, 8192, 14336, 2, False, [*[384] * 4, 512]),
        ("gather", 512, 4096, 7168, 2, False, [512]),
        ("gather", 512, 8192, 1280, 8, False, [128] * 4),
        ("gather", 2048, 4096, 3072, 4, True, [768, 768, 512]),
        ("gather", 4096, 8192, 14336, 4, True, [3968, 128]),
        ("scatter", 4096, 14336, 8192, 2, False, [*[640] * 6, 256]),
        ("scatter", 8192, 5504, 4096, 2, False, [512] * 16),
        ("scatter", 2048, 640, 5120, 8, True, [768, 1280]),
        ("scatter", 4096, 2048, 4096, 2, True, [512] * 8),
    ],
)
def test_tiles_of_llamas_are_those_of_the_hosts_code(
    kind, rows: int, inner: int, outer: int, ranks: int, ring: bool, tiles: list[int]
) -> None:
    """On the mesh of an A2 server, with sums in an order, and on an A3."""
    cut = tiling(kind, rows, inner, outer, ranks, 24 if ring else 20, ring=ring,
                 ordered=kind == "scatter")  # fmt: skip
    assert list(cut.rows) == tiles


@both
@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
def test_a_kernel_of_mc2_is_one_launch(operation, topology: str) -> None:
    rank = Rank(Links(ideal(topology), 8), 0, MC2)  # type: ignore[arg-type]
    (linear.column if operation is gather else linear.row)(rank, "x", 4096, 4096, 3584)
    assert sum(launched.launches for launched in rank.finish()) == 1


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 40000),
    ranks=st.sampled_from(RANKS),
    others=st.fixed_dictionaries({
        "kind": st.sampled_from(["gather", "scatter"]),
        "inner": st.integers(256, 65534),
        "outer": st.integers(1, 65536),
        "cores": st.sampled_from([20, 24]),
        "ring": st.booleans(),
        "ordered": st.booleans(),
    }),
)  # fmt: skip
def test_tiles_are_the_block(rows: int, ranks: int, others: dict[str, Any]) -> None:
    tiles = tiling(rows=rows, ranks=ranks, **others)
    assert sum(tiles.rows) == rows
    assert min(tiles.rows) > 0
    assert len(tiles.rows) <= 16, "the queue holds no more"
    assert len(set(tiles.rows)) <= 2, "long ones and a short one"
    assert tiles.slowed in (1.0, 1.2, 1.5, 3.0)
    assert ranks > 2 or tiles.slowed == 1


@pytest.mark.parametrize(
    ("kind", "inner", "outer", "slowed"),
    [
        # Inner dimensions from 8192 and more than 5120 columns.
        ("gather", 8192, 5376, 1.5),
        ("gather", 8192, 5120, 1),
        ("scatter", 8192, 5376, 1.2),
        # A tile's operands beyond the L2 cache.
        ("gather", 16384, 16384, 3),
    ],
)
def test_transfers_beside_large_operands_are_slowed(kind, inner, outer, slowed) -> None:
    assert tiling(kind, 1024, inner, outer, 8, 20).slowed == slowed


@pytest.mark.parametrize("ring", [False, True])
def test_the_short_tile_covers_what_is_not_hidden(ring: bool) -> None:
    # Transfers take longer than the GEMM of an output projection: the short tile is first.
    first, *_, last = tiling("scatter", 4096, 512, 4096, 8, 20, ring=ring).rows
    assert first < last
    # The GEMM takes longer: the short tile is last.
    first, *_, last = tiling("gather", 4096, 4096, 3584, 8, 20, ring=ring).rows
    assert first > last
