"""What holds for every timeline, and that it is noticed when it does not."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import Level
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import Moved, SimulationError, Timeline, simulate
from commfuse_npu.tools.simulate.group import Group, Played, collective_seconds
from commfuse_npu.tools.simulate.linear import column
from commfuse_npu.tools.simulate.links import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import Variant, variants
from tests.tools.simulate.machines import ideal
from tests.tools.simulate.timeline_checks import problems, sent, work

MACHINE = ideal(
    rate=2.0e10, latency=1.0e-5, cube_flops=3.0e14, half_rows=100.0, hbm_bandwidth=1.0e12,
    transfer_slowdown=0.1, launch_overhead=1.0e-6,
)  # fmt: skip


def shape(ranks: int, sequence: int = 480) -> LayerShape:
    return LayerShape(sequence, sequence, 1, 960, 1920, 1440, 3840, ranks)


def machine_of(topology: str, batched: bool = True):
    machine = replace(MACHINE, inside=replace(MACHINE.inside, topology=topology), batched=batched)
    if topology.startswith("nic"):
        inside = replace(MACHINE.inside, topology="full_mesh")
        between = Level(topology, 1.0e10, 2.0e-5)
        machine = replace(machine, inside=inside, between=between, npus_per_node=2)
    return machine


def played(
    size: int, variant: Variant, part: str, topology: str, batched: bool, whole: bool | None = None
) -> Played:
    group = Group(machine_of(topology, batched), size)
    build = getattr(llama, part)
    return group.play(variant, lambda rank: build(rank, shape(size)), whole=whole)


cases = st.tuples(
    st.sampled_from([2, 4, 6]),
    st.integers(0, 13),
    st.sampled_from(["forward", "backward", "head_forward", "head_backward"]),
    st.sampled_from(["full_mesh", "switched", "nic_per_npu", "nic_per_node"]),
    st.booleans(),
)


def variant_of(size: int, number: int, topology: str) -> Variant:
    members = 2 if topology.startswith("nic") and size > 2 else size
    known = variants(size, members, size - 1)
    return known[number % len(known)]


@settings(max_examples=25, deadline=None)
@given(cases)
def test_every_timeline_holds_and_one_rank_stands_for_all(case) -> None:
    size, number, part, topology, batched = case
    variant = variant_of(size, number, topology)
    one = played(size, variant, part, topology, batched)
    everyone = played(size, variant, part, topology, batched, whole=True)
    assert one.seconds == pytest.approx(everyone.seconds)
    for result in (one, everyone):
        assert problems(result.timeline, result.launches, result.links) == []


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_the_lower_bound_of_the_collectives(size: int) -> None:
    # Two gathers and two scatters forward; backward two gathers of gradients, two of inputs, and
    # two scatters. Nobody can gather or scatter with less than n-1 blocks in and out.
    sizes = LayerShape(384, 384, 1, 240, 480, 360, 960, size)
    block = sizes.block * sizes.row_bytes
    for variant in variants(size, size, size - 1):
        for build, collectives in ((llama.forward, 4), (llama.backward, 6)):
            result = Group(MACHINE, size).play(
                variant, lambda rank, build=build: build(rank, sizes), whole=True
            )
            for rank in result.launches:
                assert sent(rank) == pytest.approx(collectives * (size - 1) * block), variant.name
            moved = sum(transfer.message.size for transfer in result.timeline.moved)
            assert moved == pytest.approx(size * collectives * (size - 1) * block), variant.name


def test_all_variants_do_the_same_gemms() -> None:
    """With GEMMs linear in their rows and free memory, splitting changes no work."""
    group = Group(replace(MACHINE, half_rows=0.0, hbm_bandwidth=1e30), 4)
    for part in (llama.forward, llama.backward):
        seconds = {}
        for variant in variants(4, 4, 3):
            played = group.play(variant, lambda rank, part=part: part(rank, shape(4)), whole=True)
            seconds[variant.name] = work(played)
        assert max(seconds.values()) == pytest.approx(min(seconds.values())), seconds


# ------------------------------------------------------------------- faults are noticed


def two_ranks() -> tuple[list, Links]:
    variant = Variant("fused", "fused", Schedule(lanes=1, chunks=2))
    launches = []
    for number in range(2):
        rank = Rank(MACHINE, number, 2, 2, variant)
        column(rank, "x", 4, 5 * 10**8, 1)
        launches.append(rank.finish())
    return launches, Links(MACHINE, 2)


def test_the_events_of_a_collective_grow_with_its_transfers(monkeypatch) -> None:
    """Sharing a link anew for each of n transfers would take n * n of them."""
    pushed: list[float] = []

    def counted(events: list[Any], event: Any, push=heapq.heappush) -> None:
        pushed.append(event[0])
        push(events, event)

    monkeypatch.setattr("heapq.heappush", counted)
    machine = replace(ideal(), npus_per_node=513, inside=Level("switched", 1.0, 0.0))
    found = []
    for size in (65, 513):
        pushed.clear()
        assert collective_seconds(Group(machine, size), 1.0) == pytest.approx(size - 1)
        found.append(len(pushed) / (size - 1))
    assert found[1] <= found[0] <= 4


def test_a_receive_that_nobody_sends_is_reported() -> None:
    launches, links = two_ranks()
    operations = launches[0]
    first = next(i for i, op in enumerate(operations) if op.sends)
    operations[first] = operations[first]._replace(sends=())
    with pytest.raises(SimulationError, match="rank 1 waits for ever in 'x block 1 chunk 0' on"):
        simulate(launches, links)


def test_lanes_in_another_order_hang() -> None:
    launches, links = two_ranks()
    operations = launches[0]
    first, second = [i for i, op in enumerate(operations) if op.sends]
    operations[first], operations[second] = operations[second], operations[first]
    with pytest.raises(SimulationError, match="waits for ever"):
        simulate(launches, links)


def work_started(timeline: Timeline, later: float) -> Timeline:
    """With the last work of the engine started at another time."""
    spans = list(timeline.spans)
    last = max(i for i, span in enumerate(spans) if span.operation.engine == "compute")
    spans[last] = replace(spans[last], start=spans[last].start + later)
    return replace(timeline, spans=tuple(spans))


def first_moved(timeline: Timeline, *instead: Moved) -> Timeline:
    return replace(timeline, moved=(*instead, *timeline.moved[1:]))


FAULTS: dict[str, Callable[[Timeline], Timeline]] = {
    "busy twice": lambda one: work_started(one, -1.0),
    "starts at": lambda one: work_started(one, 1e-3),
    "the step at": lambda one: replace(one, seconds=one.seconds + 1),
    "less than": lambda one: first_moved(
        one, one.moved[0]._replace(start=one.moved[0].end - 1e-12)
    ),
    "s after": lambda one: first_moved(one, one.moved[0]._replace(ready=one.moved[0].ready - 1)),
    "carried out 2 times": lambda one: first_moved(one, one.moved[0], one.moved[0]),
    "carried out 0 times": lambda one: first_moved(one),
}


@pytest.mark.parametrize("said", FAULTS)
def test_a_fault_in_a_timeline_is_noticed(said: str) -> None:
    launches, links = two_ranks()
    timeline = simulate(launches, links)
    assert problems(timeline, launches, links) == []
    assert any(said in line for line in problems(FAULTS[said](timeline), launches, links))
