"""Attention under Ulysses context parallelism, fused and not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.group import Group, Played
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant
from tests.tools.simulate.machines import ideal
from tests.tools.simulate.timeline_checks import check_timeline, sent, work

H, QKV = 64, 96
FREE_ATTENTION = replace(ideal(), attention_efficiency=math.inf)


def shape(ranks: int, tp: int = 1, block: int = 120) -> LayerShape:
    return LayerShape(
        sequence=block, attended=ranks * block, batch=1, hidden=H, feed_forward=128, qkv=QKV,
        vocabulary=100, ranks=tp,
    )  # fmt: skip


def play(
    machine: Machine,
    what: LayerShape,
    ranks: int,
    schedule: Schedule | None = None,
    part: str = "forward",
    key_value: int = 0,
    groups: int = 64,
) -> Played:
    variant = Variant("ulysses", "fused", schedule) if schedule else REFERENCE
    context = ContextParallel(what, ranks, key_value, groups, True, True)
    return Group(machine, ranks).play(variant, getattr(context, part), whole=True)


@settings(max_examples=30, deadline=None)
@given(speed=st.floats(0.01, 100.0))
def test_two_ranks_without_attention_take_the_closed_form(speed: float) -> None:
    machine = replace(FREE_ATTENTION, cube_flops=speed)
    what = shape(2)
    qkv = machine.gemm(120, H, QKV)
    out = machine.gemm(120, H, H)
    there, back = (120 * width / 2 * ITEM_BYTES for width in (QKV, H))
    fused = play(machine, what, 2, Schedule("shifted", 1, 1)).seconds
    # The heads of the other are projected first, the own part of the output is used first.
    expected = max(qkv, qkv / 2 + there) + max(out / 2, back) + out / 2
    assert fused == pytest.approx(expected)
    plain = play(machine, what, 2).seconds
    # Without fusion the projections are not part of it.
    assert plain == pytest.approx(there + back)


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_and_work_do_not_depend_on_how_it_is_cut(part: str, tp: int, ranks: int) -> None:
    machine, what = replace(ideal(), cube_flops=50.0), shape(ranks, tp)
    cut = [Schedule("shifted", ranks - 1, chunks) for chunks in (1, 3)]
    fused = [play(machine, what, ranks, schedule, part) for schedule in cut]
    for one in (*fused, play(machine, what, ranks, part=part)):
        check_timeline(one)
        wanted = (ranks - 1) / ranks * 120 * (QKV + H) / tp * ITEM_BYTES
        assert [sent(rank) for rank in one.launches] == [pytest.approx(wanted)] * ranks
    assert work(fused[0]) == pytest.approx(work(fused[1]))
    context = ContextParallel(what, ranks, 0, 64, True, True)
    alone = Group(machine, ranks).play(COMPUTE_ONLY, getattr(context, part))
    # Projections are in it only if they are fused.
    assert (alone.seconds < work(fused[0])) is (tp == 1)
    assert alone.waiting == pytest.approx(0)


def test_heads_that_are_repeated_are_sent_more_often_and_not_projected() -> None:
    what, schedule = shape(4), Schedule("shifted", 3, 1)
    key_value = 16
    less, more = (
        play(ideal(), what, 4, schedule, key_value=key_value, groups=groups) for groups in (4, 2)
    )
    assert any(one.name == "qkv make" for one in less.launches[0])
    assert not any(one.name == "qkv make" for one in more.launches[0])
    before, after = (sent(one.launches[0]) for one in (less, more))
    assert after - before == pytest.approx(3 / 4 * 120 * 2 * key_value * ITEM_BYTES)
