"""Simple cases whose time can be written down, and what has to follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.machine import Level, Machine
from commfuse_npu.tools.simulate.rank import Rank, Work
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant, Wgrad, variants
from tests.tools.simulate.machines import ideal

ROWS = 840
"""Of a block; divisible by 1, 2, ..., 8."""

few = settings(max_examples=20, deadline=None)
very_few = settings(max_examples=3, deadline=None)
times = st.floats(0.001, 1000.0)
chunks_ = st.integers(1, 8)


def fused(lanes: int, chunks: int = 1, shape: str = "shifted", wgrad: Wgrad = "whole") -> Variant:
    return Variant("fused", "fused", schedule=Schedule(shape, lanes, chunks), wgrad=wgrad)


def rows_of(size: int, seconds: float) -> Work:
    """Work that takes so long for all rows."""
    return lambda run: (run.stop - run.start) * seconds / (ROWS * size)


def gather(machine: Machine, size: int, variant: Variant, compute: float, block: float) -> float:
    """Seconds of gathering blocks of so many bytes and working ``compute`` seconds on all."""

    def build(rank: Rank) -> None:
        rank.gather_then_work("x", ROWS, block / ROWS, rows_of(size, compute), inner=256)

    return Group(machine, size).play(variant, build).seconds


def scatter(machine: Machine, size: int, variant: Variant, compute: float, block: float) -> float:
    """Seconds of working ``compute`` seconds on all and scattering blocks of so many bytes."""

    def build(rank: Rank) -> None:
        rank.work_then_scatter("x", ROWS, block / ROWS, rows_of(size, compute), inner=256)

    return Group(machine, size).play(variant, build).seconds


both = pytest.mark.parametrize("operation", [gather, scatter])


@both
@few
@given(c=times, t=times)
def test_two_ranks_one_block_each(operation, c: float, t: float) -> None:
    time = operation(ideal(), 2, fused(1), c, t)
    assert time == pytest.approx(c / 2 + max(c / 2, t))


@both
@few
@given(c=times, t=times, chunks=chunks_)
def test_two_ranks_chunks(operation, c: float, t: float, chunks: int) -> None:
    # Chunk by chunk, each piece begins when it has arrived and the one before is done; a scatter is
    # a gather that runs backwards.
    time = c / 2
    for chunk in range(1, chunks + 1):
        time = max(time, chunk * t / chunks) + c / (2 * chunks)
    assert operation(ideal(), 2, fused(1, chunks), c, t) == pytest.approx(time)
    if t >= c:
        assert time == pytest.approx(t + c / (2 * chunks))


@both
@few
@given(c=times, t=times, size=st.integers(2, 6))
def test_a_mesh_with_everything_in_flight(operation, c: float, t: float, size: int) -> None:
    # Gathering, all blocks arrive at t. Scattering, the first transfer begins after one block.
    time = operation(ideal(), size, fused(size - 1), c, t)
    if operation is gather:
        expected = max(c / size, t) + c * (size - 1) / size
    else:
        expected = max(c, c * (size - 1) / size + t)
    assert time == pytest.approx(expected)


@few
@given(c=times, t=times, size=st.integers(2, 6))
def test_a_switch_with_everything_in_flight_makes_all_blocks_late(
    c: float, t: float, size: int
) -> None:
    time = gather(ideal("switched"), size, fused(size - 1), c, t)
    assert time == pytest.approx(max(c / size, (size - 1) * t) + c * (size - 1) / size)


@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
@few
@given(c=times, t=times, size=st.integers(2, 6), latency=st.floats(0, 10))
def test_one_lane_is_one_transfer_after_the_other(
    topology: str, c: float, t: float, size: int, latency: float
) -> None:
    # Without a bound on what is posted ahead; two transfers are ahead at this size.
    time = c / size
    for number in range(1, size):
        time = max(time, number * (t + latency)) + c / size
    assert gather(ideal(topology, latency=latency), size, fused(1), c, t) >= time * (1 - 1e-9)
    if size <= 3:  # everything fits into the window
        assert gather(ideal(topology, latency=latency), size, fused(1), c, t) == pytest.approx(time)


@both
@few
@given(c=times, t=times, size=st.integers(2, 6))
def test_plain_is_the_sum(operation, c: float, t: float, size: int) -> None:
    ring = Variant("ring", "plain", ring=True)
    assert operation(ideal(), size, REFERENCE, c, t) == pytest.approx(c + t)
    assert operation(ideal(), size, ring, c, t) == pytest.approx(c + (size - 1) * t)
    switched = ideal("switched")
    for variant in (REFERENCE, ring):
        assert operation(switched, size, variant, c, t) == pytest.approx(c + (size - 1) * t)


@both
@few
@given(c=times, t=times, slices=st.sampled_from([1, 2, 4, 8]))
def test_slices_leave_a_tail(operation, c: float, t: float, slices: int) -> None:
    variant = Variant("coc", "sliced", slices=slices)
    expected = max(c, t) + min(c, t) / slices
    assert operation(ideal(), 4, variant, c, t) == pytest.approx(expected)


@few
@given(c=times, t=times)
def test_a_fused_kernel_leaves_one_tile(c: float, t: float) -> None:
    kernel = Variant("mc2", "kernel")
    assert gather(ideal(), 4, kernel, c, t) == pytest.approx(max(c, t + c / 64))
    # 3 ranks are beyond its limits: plain.
    assert gather(ideal(), 3, kernel, c, t) == pytest.approx(c + t)


def every(size: int) -> list[Variant]:
    return variants(size, size, max(1, size - 1))


@both
@very_few
@given(c=times, t=times)
def test_links_without_limits_leave_the_work(operation, c: float, t: float) -> None:
    for size in (1, 2, 4):
        for variant in every(size):
            for topology in ("full_mesh", "switched"):
                # One rank transfers nothing, whatever the links.
                machine = ideal(topology, rate=math.inf if size > 1 else 1.0)
                assert operation(machine, size, variant, c, t) == pytest.approx(c), variant.name


@both
@very_few
@given(c=times, t=times, size=st.sampled_from([2, 3, 4]))
def test_no_variant_beats_work_or_wire(operation, c: float, t: float, size: int) -> None:
    for variant in every(size):
        time = operation(ideal(), size, variant, c, t)
        assert time >= max(c, t) * (1 - 1e-9), variant.name
        assert operation(ideal(), size, COMPUTE_ONLY, c, t) == pytest.approx(c)


@both
@very_few
@given(c=times, t=times, more=st.floats(1.0, 3.0), size=st.sampled_from([2, 4]))
def test_more_of_anything_never_takes_less(
    operation, c: float, t: float, more: float, size: int
) -> None:
    for variant in every(size):
        time = operation(ideal(latency=0.1), size, variant, c, t) * (1 - 1e-9)
        assert operation(ideal(latency=0.1), size, variant, c * more, t) >= time, variant.name
        assert operation(ideal(latency=0.1), size, variant, c, t * more) >= time, variant.name
        assert operation(ideal(rate=1 / more, latency=0.1), size, variant, c, t) >= time
        assert operation(ideal(latency=0.1 * more), size, variant, c, t) >= time, variant.name


@both
@very_few
@given(c=times, t=times, factor=st.floats(0.1, 10), size=st.sampled_from([2, 3]))
def test_time_has_no_scale(operation, c: float, t: float, factor: float, size: int) -> None:
    for variant in every(size):
        for topology in ("full_mesh", "switched"):
            time = operation(ideal(topology), size, variant, c, t)
            scaled = operation(ideal(topology), size, variant, c * factor, t * factor)
            assert scaled == pytest.approx(time * factor), variant.name


@few
@given(c=times, t=st.floats(0.001, 0.4), slowdown=st.floats(0, 0.2))
def test_transfers_slow_the_work_that_hides_them(c: float, t: float, slowdown: float) -> None:
    machine = ideal(transfer_slowdown=slowdown)
    # While the transfer runs, for t * c seconds, this share of the speed is lost.
    assert gather(machine, 2, fused(1), c, t * c) == pytest.approx(c + slowdown * t * c)


def test_a_host_that_launches_slowly_is_what_is_waited_for() -> None:
    machine = ideal(rate=math.inf, launch_overhead=2.0)
    # Gather, own block, other block: three launches.
    assert gather(machine, 2, fused(1), 0.0, 1.0) == pytest.approx(6.0)


def test_partials_are_added_in_memory() -> None:
    machine = ideal(rate=math.inf, hbm_bandwidth=3.0)
    # Two partials of 5 bytes are read, and so is the sum, which is written.
    assert scatter(machine, 3, fused(2), 1.0, 5.0) == pytest.approx(1.0 + 2 * 5.0)


def test_a_nic_of_a_node_is_shared_and_one_of_an_npu_is_not() -> None:
    for topology, expected in (("nic_per_npu", 6.0), ("nic_per_node", 24.0)):
        machine = replace(ideal(rate=math.inf), npus_per_node=4, between=Level(topology, 1.0, 0.0))
        # Three peers in other nodes; the other three NPUs of each node do the same.
        group = Group(machine, 4, stride=4)
        assert group.collective("gather", 2.0, REFERENCE) == pytest.approx(expected)
        # Both of a node's ranks send to both of the other's.
        machine = replace(machine, npus_per_node=2)
        pair = {"nic_per_npu": 4.0, "nic_per_node": 8.0}[topology]
        group = Group(machine, 4)
        assert group.collective("gather", 2.0, REFERENCE) == pytest.approx(pair)


# ------------------------------------------------------------------- a column's backward


def column(size: int, variant: Variant, dgrad: float, wgrad: float, block: float) -> float:
    def build(rank: Rank) -> None:
        rank.column_backward(
            "x", ROWS, block / ROWS, rows_of(size, dgrad), rows_of(size, wgrad),
            copied_row_bytes=0,
        )  # fmt: skip

    return Group(ideal(), size).play(variant, build).seconds


def row(size: int, variant: Variant, dgrad: float, wgrad: float, block: float) -> float:
    def build(rank: Rank) -> None:
        rank.row_backward(
            "x", ROWS, block / ROWS, rows_of(size, dgrad), rows_of(size, wgrad),
            copied_row_bytes=0, inner=256,
        )  # fmt: skip

    return Group(ideal(), size).play(variant, build).seconds


@few
@given(d=times, w=times, t=times)
def test_a_column_backward_overlaps_as_its_variant_says(d: float, w: float, t: float) -> None:
    assert column(4, REFERENCE, d, w, t) == pytest.approx(t + d + t + w)
    # Gathered during dgrad, scattered during wgrad.
    assert column(4, Variant("megatron", "megatron"), d, w, t) == pytest.approx(
        max(d, t) + max(w, t)
    )
    # One lane: the gather, then the one block of dgrad that is sent; wgrad needs the gather only.
    assert column(2, fused(1), d, w, t) == pytest.approx(max(max(d, t) + w, max(d / 2, t) + t))
    # By blocks the half of wgrad that needs no transfer hides the gather, too.
    assert column(2, fused(1, wgrad="blocks"), d, w, t) == pytest.approx(
        max(max(d + w / 2, t) + w / 2, max(d / 2, t) + t)
    )


@few
@given(d=times, w=times, t=times)
def test_a_row_backward_hides_its_gather_behind_what_it_may_compute(
    d: float, w: float, t: float
) -> None:
    assert row(2, REFERENCE, d, w, t) == pytest.approx(t + d + w)
    assert row(2, fused(1), d, w, t) == pytest.approx(max(d / 2, t) + d / 2 + w)
    blocks = row(2, fused(1, wgrad="blocks"), d, w, t)
    assert blocks == pytest.approx(max((d + w) / 2, t) + (d + w) / 2)


# ------------------------------------------------------------------- scratch memory


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("size", "lanes", "chunks"), [(6, 1, 2), (8, 2, 1), (4, 3, 4)])
def test_no_more_is_posted_ahead_than_the_scratch_memory_holds(
    in_place: bool, size: int, lanes: int, chunks: int
) -> None:
    variant = fused(lanes, chunks)
    rank = Rank(ideal(), 0, size, size, variant)
    rank.gather_then_work("x", ROWS, 1.0, lambda run: 1.0, whole=in_place)
    window = variant.schedule.plan("gather", 0, size).window
    posted, used, most = 0, -1, 0  # the own block uses no message
    for operation in rank.finish().operations:
        if operation.sends:
            posted += 1
        else:
            used += 1
        most = max(most, posted - max(0, used))
    assert posted == (size - 1) * chunks
    assert most == (posted if in_place else window)


# ------------------------------------------------------------------- causal attention


@few
@given(size=st.sampled_from([2, 4, 8]), factor=st.floats(0.5, 3.0))
def test_attention_of_later_queries_costs_more_and_all_of_it_the_same(
    size: int, factor: float
) -> None:
    shape = LayerShape(ROWS * size, ROWS * size, 1, 8, 8, 24, 8, size)
    work = shape.attention(ideal(), factor)
    blocks = [work(slice(ROWS * number, ROWS * (number + 1))) for number in range(size)]
    whole = factor * 2.0 * (ROWS * size) ** 2 * 8 / size  # 2 * S^2 * H FLOP over all ranks
    assert sum(blocks) == pytest.approx(whole)
    # Block b of N sees the keys up to its own end: (2b + 1) / N^2 of the triangle.
    for number, block in enumerate(blocks):
        assert block == pytest.approx(whole * (2 * number + 1) / size**2)
