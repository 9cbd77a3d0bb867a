"""Properties of every timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import Level
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import simulate
from commfuse_npu.tools.simulate.group import Group, Simulated
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE, Links, Message, Operation
from commfuse_npu.tools.simulate.linear import column
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, Variant
from tests.tools.simulate.machines import ideal, variants
from tests.tools.simulate.timeline_checks import check_timeline, sent, work

MACHINE = ideal(
    rate=2.0e10, latency=1.0e-5, cube_flops=3.0e14, half_rows=100.0, hbm_bandwidth=1.0e12,
    transfer_slowdown=0.1, launch_overhead=1.0e-6,
)  # fmt: skip


def shape(ranks: int) -> LayerShape:
    return LayerShape(480, 480, 1, 960, 1920, 1440, 3840, ranks)


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from([2, 4, 6, 8]),
    number=st.integers(0, 99),
    part=st.sampled_from(["forward", "backward", "head_forward", "head_backward"]),
    topology=st.sampled_from(["full_mesh", "switched", "nic_per_npu"]),
    batched=st.booleans(),
)
@example(4, [v.name for v in variants(4, 3)].index("mc2"), "forward", "switched", True)
def test_every_timeline_holds_and_one_rank_stands_for_all(
    size: int, number: int, part: str, topology: str, batched: bool
) -> None:
    over_nics = topology == "nic_per_npu"
    inside = replace(MACHINE.inside, topology="full_mesh" if over_nics else topology)
    machine = replace(MACHINE, inside=inside, batched=batched)
    if over_nics:
        machine = replace(machine, between=Level(topology, 1.0e10, 2.0e-5), npus_per_node=2)
    choices = [*variants(size, size - 1, 2 if over_nics and size > 2 else None), FB_OVERLAP]

    def simulate(whole: bool | None) -> Simulated:
        build, variant = getattr(llama, part), choices[number % len(choices)]
        group = Group(machine, size)
        return group.simulate(variant, lambda rank: build(rank, shape(size)), whole=whole)

    single, everyone = simulate(None), simulate(True)
    assert single.seconds == pytest.approx(everyone.seconds)
    check_timeline(single)
    check_timeline(everyone)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_variants_do_the_same_gemms_and_send_the_lower_bound(size: int) -> None:
    # Two gathers and two scatters forward; backward two gathers of gradients, two of inputs, and
    # two scatters. A gather or scatter needs at least n-1 blocks in and out of a rank.
    sizes = LayerShape(384, 384, 1, 240, 480, 360, 960, size)
    block = sizes.block * sizes.row_bytes
    # With GEMMs linear in their rows and free memory, splitting changes no work.
    group = Group(replace(MACHINE, half_rows=0.0, hbm_bandwidth=1e30), size)
    for build, collectives in ((llama.forward, 4), (llama.backward, 6)):
        busy = set[float]()
        for variant in variants(size, size - 1):
            simulated = group.simulate(
                variant, lambda rank, build=build: build(rank, sizes), whole=True
            )
            for rank in simulated.launches:
                assert sent(rank) == pytest.approx(collectives * (size - 1) * block), variant.name
            busy.add(work(simulated))
        assert max(busy) == pytest.approx(min(busy))


def test_a_receive_that_nobody_sends_and_lanes_in_another_order_hang() -> None:
    variant, launches = Variant("fused", "fused", Schedule(lanes=1, chunks=2)), []
    for number in range(2):
        rank = Rank(Links(MACHINE, 2), number, variant)
        column(rank, "x", 4, 5 * 10**8, 1)
        launches.append(rank.finish())
    (operations, other), links = launches, Links(MACHINE, 2)
    first, second = [i for i, op in enumerate(operations) if op.sends]
    lacking, swapped = list(operations), list(operations)
    lacking[first] = operations[first]._replace(sends=())
    with pytest.raises(AssertionError, match="operations wait"):
        simulate([lacking, other], links)
    swapped[first], swapped[second] = operations[second], operations[first]
    with pytest.raises(AssertionError, match="operations wait"):
        simulate([swapped, other], links)


def test_work_is_slowed_by_transfers_of_its_rank_and_by_the_other_stream() -> None:
    message = Message(("x",), 0, 1, 2.0, delay=1.0)
    work, aside = Operation("work", COMPUTE, 4.0), Operation("aside", ASIDE, 4.0)
    ends = Operation("x", "lane", sends=(message,)), Operation("x", "lane", receives=(message,))
    links = Links(ideal(transfer_slowdown=0.5), 4)
    timeline = simulate([[work, ends[0]], [work, ends[1]], [work], [work, aside]], links)
    assert [(moved.start, moved.end) for moved in timeline.moved] == [(1.0, 3.0)]
    finished = {span.rank: span.end for span in timeline.spans if span.operation == work}
    assert finished == {0: 5.0, 1: 5.0, 2: 4.0, 3: 8.0}


def test_a_transfer_of_another_group_has_links_of_its_own() -> None:
    links = Links(ideal("switched"), 2)
    assert not {*links.path(0, 0)} & {*links.path(0, 1), *links.path(1, 0)}
