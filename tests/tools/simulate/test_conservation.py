"""Properties of every timeline."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.tools.hardware.machine import Level
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import (
    COMPUTE,
    SIDE_STREAM,
    Links,
    Message,
    Operation,
    Simulated,
)
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import side_by_side
from commfuse_npu.tools.simulate.rank import simulate
from commfuse_npu.tools.simulate.variants import OVERLAP
from tests.tools.simulate.machines import check_timeline, ideal, variants

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
)
@example(4, [v.name for v in variants(3)].index("MC2"), "forward", "switched")
def test_every_timeline_holds_and_one_rank_stands_for_all(
    size: int, number: int, part: str, topology: str
) -> None:
    over_nics = topology == "nic_per_npu"
    inside = replace(MACHINE.inside, topology="full_mesh" if over_nics else topology)
    machine = replace(MACHINE, inside=inside)
    if over_nics:
        machine = replace(machine, between=Level(topology, 1.0e10, 2.0e-5), npus_per_node=2)
    choices = [*variants(size - 1), OVERLAP]

    def timeline(whole: bool | None) -> Simulated:
        build, variant = getattr(llama, part), choices[number % len(choices)]
        links = Links(machine, size)
        return simulate(links, variant, lambda rank: build(rank, shape(size)), whole=whole)

    single, everyone = timeline(None), timeline(True)
    assert single.seconds == pytest.approx(everyone.seconds)
    check_timeline(single)
    check_timeline(everyone)


def test_work_is_slowed_by_transfers_and_the_side_stream() -> None:
    message = Message(("x",), 0, 1, 2.0, delay=1.0)
    work = Operation("work", COMPUTE, 4.0)
    beside = Operation("beside", SIDE_STREAM, 4.0)
    ends = Operation("x", "lane", sends=(message,)), Operation("x", "lane", receives=(message,))
    links = Links(ideal(transfer_slowdown=0.5), 4)
    run = Simulated([[work, ends[0]], [work, ends[1]], [work], [work, beside]], links)
    assert [(moved.start, moved.end) for moved in run.moved] == [(1.0, 3.0)]
    finished = {span.rank: span.end for span in run.spans if span.operation == work}
    assert finished == {0: 5.0, 1: 5.0, 2: 4.0, 3: 8.0}


def test_a_group_that_no_nodes_hold_evenly_is_refused() -> None:
    machine = ideal(npus_per_node=6)
    with pytest.raises(ValueError, match="8 ranks, 1 NPUs apart, does not fit a node of 6"):
        Links(machine, 8)
    with pytest.raises(ValueError, match="does not fill whole nodes of 6 NPUs"):
        Links(replace(machine, between=Level("nic_per_npu", 1.0, 0.0)), 8)


def test_a_transfer_of_another_group_has_links_of_its_own() -> None:
    links = Links(ideal("switched"), 2)
    assert not {*links.path(0, 0)} & {*links.path(0, 1), *links.path(1, 0)}


# ------------------------------------------------------------------- pipelines of pairs


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
