"""Passes that take turns, beside a model of one device and one link that follows the same rule."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.group import simulate
from commfuse_npu.tools.simulate.launches import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, MEGATRON
from tests.tools.simulate.machines import check_timeline, ideal, sent

RANKS = 4
SHAPE = LayerShape(480, 480, 1, 96, 256, 144, 3840, RANKS)
TRANSFER = SHAPE.block * SHAPE.row_bytes
QKV, FC1 = ITEM_BYTES * 480 * 96 * 144 / RANKS, ITEM_BYTES * 480 * 96 * 512 / RANKS
PROJ, FC2, ATTENTION = 2 * 480 * 96 * 96 / 4, FC1 / 2, 2 * 480 * 480 * 96 / 4


# What passes do, in order: ("work", FLOP), ("send", transfer), ("wait", transfer), ("later", FLOP
# of a weight gradient, its transfer), ("begin", pass), ("join", pass).  Element-wise work is free.
Steps = list[tuple[Any, ...]]


def forward(name: str, whole: bool = True) -> Steps:
    """A layer: gather, qkv, attention, proj, scatter, gather, fc1, fc2, scatter."""
    steps: Steps = []
    for work in (QKV + ATTENTION + PROJ, FC1 + FC2 if whole else FC1):
        steps += [("send", f"{name} in"), ("wait", f"{name} in"), ("work", work)]
        steps += [("send", f"{name} out"), ("wait", f"{name} out")]
    return steps if whole else steps[:-2]


def backward(name: str) -> Steps:
    """A layer: each half gathers gradients and, beside dgrad, its input, and scatters."""
    steps: Steps = []
    for row, column, between in ((FC2, FC1, 0.0), (PROJ, QKV, 2.5 * ATTENTION)):
        own = f"{name} {column}"
        steps += [("send", "gradients"), ("wait", "gradients"), ("work", row), ("later", row, "")]
        steps += [("work", between), ("send", own), ("work", column), ("send", "sum")]
        steps += [("later", column, own), ("wait", "sum")]
    return steps


def passes(layers: int, recomputed: int, beside: bool) -> dict[str, Steps]:
    """By name: a forward of other layers, gradients, and recomputations of layers by number."""
    found: dict[str, Steps] = {}
    if beside:
        found["forward"] = [step for layer in range(layers) for step in forward("forward")]
    gradients = found["gradients"] = []
    for layer in reversed(range(layers)):
        if layer < recomputed:
            first = layer == recomputed - 1
            gradients += forward("again", whole=False) if first else [("join", f"again {layer}")]
            if layer:
                gradients.append(("begin", f"again {layer - 1}"))
                found[f"again {layer - 1}"] = forward(f"again {layer - 1}", whole=False)
        gradients += backward(f"{layer}")
    return found


def seconds_by_the_rule(found: dict[str, Steps], flops: float) -> float:
    """Seconds on a device that makes so many FLOP a second, and a link of 1 byte/s."""
    now = link = 0.0
    arrivals, queue = {"": 0.0}, list[tuple[float, str]]()
    order, at = [name for name in found if "again" not in name], dict.fromkeys(found, 0)
    name, waited = order[0], dict.fromkeys(found, False)

    def compute(work: float, transfer: str = "") -> None:
        nonlocal now
        now = max(now, arrivals[transfer]) + work / flops

    def stops(name: str) -> bool:
        if at[name] == len(found[name]):
            return True
        kind, *what = found[name][at[name]]
        return kind == "join" and at[what[0]] < len(found[what[0]])

    while not all(map(stops, order)):
        while not stops(name):
            kind, *what = found[name][at[name]]
            if kind == "wait" and not waited[name]:
                waited[name] = True
                break
            if kind == "wait":
                waited[name] = False
                running = [n for n in order if at[n] < len(found[n]) and "again" not in n]
                if name == running[0] and queue:
                    compute(*queue.pop(0))
                compute(0.0, what[0])
            elif kind == "work":
                compute(what[0])
            elif kind == "send":
                link = arrivals[what[0]] = max(link, now) + TRANSFER
            elif kind == "later":
                if len(queue) == 4:
                    compute(*queue.pop(0))
                queue.append((what[0], what[1]))
            elif kind == "begin":
                order.append(what[0])
            at[name] += 1
        turn = order.index(name) + 1
        name = next((n for n in [*order[turn:], *order[:turn]] if not stops(n)), name)
    for work, transfer in queue:
        compute(work, transfer)
    return now


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    recomputed=st.integers(0, 5),
    beside=st.booleans(),
    flops=st.floats(50.0, 5000.0),
)
def test_passes_take_as_long_as_the_rule_says(
    layers: int, recomputed: int, beside: bool, flops: float
) -> None:
    recomputed = min(layers, recomputed)
    parts = Layers(SHAPE, recomputed, True), Layers(SHAPE, layers - recomputed)
    links = Links(ideal(cube_flops=flops), RANKS)
    build = partial(take_turns, chunk=parts, forward=beside, backward=True)
    simulated = simulate(links, FB_OVERLAP, build)
    check_timeline(simulated)
    expected = seconds_by_the_rule(passes(layers, recomputed, beside), flops)
    assert simulated.seconds == pytest.approx(expected)


def test_passes_launch_what_megatron_launches_but_the_last_sums_of_recomputations() -> None:
    def in_order(rank: Rank) -> None:
        for part in [llama.forward] * 5 + [llama.backward] * 3:
            part(rank, SHAPE)

    chunk = Layers(SHAPE, 2, True), Layers(SHAPE, 1)
    in_turns = partial(take_turns, chunk=chunk, forward=True, backward=True)
    ours, plain = (
        Counter((op.name, op.seconds, sent([op])) for op in run.launches[0] if op.name != "end")
        for run in (
            simulate(Links(ideal(), RANKS), FB_OVERLAP, in_turns),
            simulate(Links(ideal(), RANKS), MEGATRON, in_order),
        )
    )
    assert 0 < ours.pop(("hand over", 0.0, 0)) <= 2 * plain.total()
    assert (plain - ours).total() == 2 * 2
    assert all(name.startswith("fc2") for name, *_ in plain - ours)
    assert not ours - plain
