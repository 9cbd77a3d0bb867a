"""Passes that take turns, beside a model of one device and one link that follows the same rule."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.rank import Rank, collective_seconds, simulate
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, MEGATRON, OVERLAP
from scripts.evidence.layers import layer
from tests.tools.simulate.machines import check_timeline, ideal

RANKS = 4
SHAPE = LayerShape(480, 480, 1, 96, 256, 144, 3840, RANKS)
TRANSFER = SHAPE.block * SHAPE.row_bytes
QKV, FC1 = ITEM_BYTES * 480 * 96 * 144 / RANKS, ITEM_BYTES * 480 * 96 * 512 / RANKS
PROJ, FC2, ATTENTION = 2 * 480 * 96 * 96 / 4, FC1 / 2, 2 * 480 * 480 * 96 / 4


def seconds_by_the_rule(
    layers: int, recomputed: int, beside: bool, split: bool, flops: float
) -> float:
    """Seconds on a device that makes so many FLOP a second, and a link of 1 byte/s.

    Without ``split`` rows nothing is gathered, and sums are all-reduced: two transfers in one.  A
    pass yields when a transfer arrives, at the point at which it waits for it, or (gradients) 0
    while it waits for the end of the recomputation.  Element-wise work is free.
    """
    now = link = 0.0
    queue: list[tuple[float, float]] = []

    def work(flop: float, arrived: float = 0.0) -> None:
        nonlocal now
        now = max(now, arrived) + flop / flops

    def send() -> float:
        nonlocal link
        link = max(link, now) + (TRANSFER if split else 2 * TRANSFER)
        return link

    def later(flop: float, arrived: float = 0.0) -> None:
        if len(queue) == 4:
            work(*queue.pop(0))
        queue.append((flop, arrived))

    def forward(*halves: float) -> Iterator[float]:
        for flop in halves:
            yield from gather()
            work(flop)
            if flop != FC1:  # of a recomputation
                yield send()

    def gather() -> Iterator[float]:
        if split:
            yield send()

    def gradients() -> Iterator[float]:
        for number in reversed(range(layers)):
            if number == recomputed - 1:
                yield from forward(QKV + ATTENTION + PROJ, FC1)
            while len(passes) - 1 not in {beside, *ended}:
                yield 0.0
            if 0 < number < recomputed:
                passes.append(forward(QKV + ATTENTION + PROJ, FC1))
            for row, column, between in ((FC2, FC1, 0.0), (PROJ, QKV, 2.5 * ATTENTION)):
                yield from gather()
                work(row)
                later(row)
                work(between)
                gathered = next(gather(), 0.0)
                work(column)
                summed = send()
                later(column, gathered)
                yield summed

    whole = (QKV + ATTENTION + PROJ, FC1 + FC2) * layers
    passes = [forward(*whole), gradients()] if beside else [gradients()]
    ended, arrivals, at = set[int](), dict[int, float](), 0
    while len(ended) < len(passes):
        if arrival := arrivals.get(at):
            if queue and at == min({*range(len(passes))} - ended):
                work(*queue.pop(0))
            work(0.0, arrival)
        arrivals[at] = next(passes[at], -1.0)
        if arrivals[at] < 0:
            ended.add(at)
        others = (turn % len(passes) for turn in range(at + 1, at + len(passes)))
        at = next((turn for turn in others if turn not in ended), at)
    for flop, arrived in queue:
        work(flop, arrived)
    return now


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    recomputed=st.integers(0, 5),
    beside=st.booleans(),
    split=st.booleans(),
    flops=st.floats(50.0, 5000.0),
)
def test_passes_take_as_long_as_the_rule_says(
    layers: int, recomputed: int, beside: bool, split: bool, flops: float
) -> None:
    recomputed, shape = min(layers, recomputed), replace(SHAPE, sequence_parallel=split)
    parts = Layers(shape, recomputed, True), Layers(shape, layers - recomputed)
    links = Links(ideal(cube_flops=flops), RANKS)
    build = partial(take_turns, chunk=parts, forward=beside, backward=True)
    simulated = simulate(links, OVERLAP, build)
    check_timeline(simulated)
    expected = seconds_by_the_rule(layers, recomputed, beside, split, flops)
    assert simulated.seconds == pytest.approx(expected)


def test_passes_launch_all_but_the_unread_tail() -> None:
    def in_order(rank: Rank) -> None:
        for part in [llama.forward] * 5 + [llama.backward] * 3:
            part(rank, SHAPE)

    chunk = Layers(SHAPE, 1, True), Layers(SHAPE, 1), Layers(SHAPE, 1, True)
    in_turns = partial(take_turns, chunk=chunk, forward=True, backward=True)
    ours, plain = (
        Counter(op.name for op in simulate(Links(ideal(), RANKS), form, build).launches[0])
        for form, build in ((OVERLAP, in_turns), (MEGATRON, in_order))
    )
    assert plain - ours == {"fc2": 2, "fc2 scatter": 2}
    assert (ours - plain).keys() == {"hand over"}


@pytest.mark.parametrize("name", ["ascend_910b_server", "ascend_910c_supernode"])
def test_layers_take_hardly_longer_than_work_or_transfers(name: str) -> None:
    """Host time, and slower computation and transfers beside each other, left out."""
    machine = Hardware.find(name).machine()
    inside = replace(machine.inside, beside_work=1.0)
    machine = replace(machine, transfer_slowdown=0.0, launch_overhead=0.0, inside=inside)
    for model, tp, tokens in product(("llama2_7b", "llama3_8b"), (2, 8), (4096, 32768)):
        job = layer(model, tp, tokens)
        step = TrainingStep(machine, replace(job, recomputed=job.model.num_layers))
        kept = TrainingStep(machine, job).chunk(OVERLAP, 0).pair
        full, shape = step.chunk(OVERLAP, 0), step.training.shape
        forward, backward, again = step.layer_time(COMPUTE_ONLY)
        again -= machine.gemm(tokens, shape.feed_forward // tp, shape.hidden)
        transfer = collective_seconds(Links(machine, tp), shape.block * shape.row_bytes)
        for seconds, work, transfers, most in (
            (kept, forward + backward, 4 + 6, 1.115),
            (full.pair, forward + again + backward, 4 + 3 + 6, 1.085),
            (full.backward, again + backward, 3 + 6, 1.055),
        ):
            bound = step.training.model.num_layers * max(work, transfers * transfer)
            assert bound <= seconds < most * bound
