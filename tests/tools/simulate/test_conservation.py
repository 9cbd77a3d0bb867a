"""Properties of every timeline."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import Level
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.plan.turn_order import strict_turns
from commfuse_npu.tools.simulate import fb_overlap, llama
from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.group import simulate
from commfuse_npu.tools.simulate.launches import (
    ASIDE,
    COMPUTE,
    Links,
    Message,
    Operation,
    PlacementError,
)
from commfuse_npu.tools.simulate.linear import row
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import side_by_side
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, MEGATRON, fused
from tests.tools.simulate.machines import check_timeline, ideal, sent, variants, work

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
@example(4, [v.name for v in variants(3)].index("mc2"), "forward", "switched", True)
def test_every_timeline_holds_and_one_rank_stands_for_all(
    size: int, number: int, part: str, topology: str, batched: bool
) -> None:
    over_nics = topology == "nic_per_npu"
    inside = replace(MACHINE.inside, topology="full_mesh" if over_nics else topology)
    machine = replace(MACHINE, inside=inside, batched=batched)
    if over_nics:
        machine = replace(machine, between=Level(topology, 1.0e10, 2.0e-5), npus_per_node=2)
    choices = [*variants(size - 1), FB_OVERLAP]

    def timeline(whole: bool | None) -> Simulated:
        build, variant = getattr(llama, part), choices[number % len(choices)]
        links = Links(machine, size)
        return simulate(links, variant, lambda rank: build(rank, shape(size)), whole=whole)

    single, everyone = timeline(None), timeline(True)
    assert single.seconds == pytest.approx(everyone.seconds)
    check_timeline(single)
    check_timeline(everyone)


def test_a_layer_gathers_its_inputs_ahead() -> None:
    """Posted after all transfers of the row-parallel layer, before its weight gradient."""
    rank = Rank(Links(MACHINE, 6), 1, fused(Schedule(lanes=5, chunks=2)))
    llama.backward(rank, shape(6))
    names = [operation.name for operation in rank.finish()]
    for earlier, later in (("fc2", "fc1"), ("proj", "qkv")):
        posts, ahead = (
            [at for at, name in enumerate(names) if name.startswith(f"{layer} backward block")]
            for layer in (earlier, later)
        )
        assert len(ahead) == 5
        assert max(posts) < min(ahead) <= max(ahead) < names.index(f"{earlier} backward wgrad")


def test_work_waits_for_sends_whose_memory_it_writes() -> None:
    """On gloo, where a receive is complete without the send; two groups of columns have memory."""
    rank = Rank(Links(replace(MACHINE, batched=False), 2), 0, fused(Schedule(lanes=1, chunks=4)))
    row(rank, "x", 4, 8, 8)
    operations = rank.finish()
    sends = {at for at, operation in enumerate(operations) if operation.sends}
    assert len(sends) == 4
    assert sends <= {at for operation in operations for at in operation.after}


def test_work_is_slowed_by_transfers_of_its_rank_and_by_the_other_stream() -> None:
    message = Message(("x",), 0, 1, 2.0, delay=1.0)
    work, aside = Operation("work", COMPUTE, 4.0), Operation("aside", ASIDE, 4.0)
    ends = Operation("x", "lane", sends=(message,)), Operation("x", "lane", receives=(message,))
    links = Links(ideal(transfer_slowdown=0.5), 4)
    run = Simulated([[work, ends[0]], [work, ends[1]], [work], [work, aside]], links)
    assert [(moved.start, moved.end) for moved in run.moved] == [(1.0, 3.0)]
    finished = {span.rank: span.end for span in run.spans if span.operation == work}
    assert finished == {0: 5.0, 1: 5.0, 2: 4.0, 3: 8.0}


def test_a_group_that_no_nodes_hold_evenly_is_refused() -> None:
    machine = ideal(npus_per_node=6)
    with pytest.raises(PlacementError, match="8 ranks, 1 NPUs apart, does not fit a node of 6"):
        Links(machine, 8)
    with pytest.raises(PlacementError, match="does not fill whole nodes of 6 NPUs"):
        Links(replace(machine, between=Level("nic_per_npu", 1.0, 0.0)), 8)


def test_a_transfer_of_another_group_has_links_of_its_own() -> None:
    links = Links(ideal("switched"), 2)
    assert not {*links.path(0, 0)} & {*links.path(0, 1), *links.path(1, 0)}


# ------------------------------------------------------------------- interleaved passes

SHAPE = LayerShape(1024, 1024, 1, 512, 1024, 768, 4096, 4)
RATE = 0.002
"""Rate of the links: a transfer takes a fifth of the largest GEMM, at 1 FLOP/s."""


def simulated(*, recomputes: bool = False, rate: float = RATE) -> Simulated:
    return simulate(
        Links(ideal(rate=rate), 4),
        FB_OVERLAP,
        lambda rank: fb_overlap.pair(rank, SHAPE, 2, recomputes=recomputes),
    )


def in_order(*, recomputes: bool = False) -> Simulated:
    def build(rank: Rank) -> None:
        for _ in range(2):
            llama.forward(rank, SHAPE)
        for _ in range(2):
            if recomputes:
                llama.forward(rank, SHAPE)
            llama.backward(rank, SHAPE)

    return simulate(Links(ideal(rate=RATE), 4), MEGATRON, build)


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
        assert simulated().device == pytest.approx(plain.device, rel=1e-6)
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
