"""Experts, latent attention, Ulysses, layers without sequence parallelism, in closed form.

Links carry 1 byte/s, and the compute engine makes 1 FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate import fb_overlap, llama
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.group import Group, Simulated
from commfuse_npu.tools.simulate.latent import Latent
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import (
    COMPUTE_ONLY,
    FB_OVERLAP,
    MEGATRON,
    REFERENCE,
    Variant,
)
from tests.tools.simulate.machines import ideal
from tests.tools.simulate.timeline_checks import check_timeline, sent, work

TOKENS, HIDDEN, TP = 64, 16, 4
DENSE = LayerShape(TOKENS, TOKENS, 1, HIDDEN, 32, 48, 64, TP)
EXPERTS = Experts(number=8, each=2, width=24, shared=0, parallel=4, tensor=1)
ROW = HIDDEN * ITEM_BYTES


def seconds(variant: Variant, build: Callable[[Rank], None], ranks: int = TP) -> float:
    return Group(ideal(), ranks).simulate(variant, build, steady=True).seconds


def ways(shape: LayerShape, variant: Variant, ranks: int = TP) -> list[float]:
    """Seconds of a layer, forward and backward."""
    passes = llama.forward, llama.backward
    return [seconds(variant, lambda rank, part=part: part(rank, shape), ranks) for part in passes]


@pytest.mark.parametrize(("tensor", "halves"), [(1, 1), (2, 2), (4, 2)])
def test_products_of_experts_are_those_of_the_tokens_that_arrive(tensor: int, halves: int) -> None:
    """However experts are cut, a rank computes its share of all products."""
    experts = replace(EXPERTS, tensor=tensor, halves=halves)
    router = 2 * TOKENS * HIDDEN * 8
    products = 2 * TOKENS * 2 * (halves + 1) * HIDDEN * 24
    for part, times in (experts.forward, 1), (experts.backward, 2):
        total = seconds(COMPUTE_ONLY, lambda rank, part=part: part(rank, TOKENS, HIDDEN))
        assert total == times * (router + products)


@pytest.mark.parametrize(
    ("changes", "bytes_per_link"),
    [
        # To each of 4 ranks a quarter of 2 rows per token.
        ({}, TOKENS * 2 / 4 * ROW),
        # In addition, both ranks of a pair gather all rows that arrived.
        ({"tensor": 2}, TOKENS * 2 / 4 * ROW + TOKENS * 2 * ROW),
        ({"gathers": True, "tensor": 2}, TOKENS * ROW),
        ({"parallel": 1}, 0),
    ],
)
def test_rows_to_experts_go_over_their_own_links(changes, bytes_per_link: float) -> None:
    experts = replace(EXPERTS, **changes)
    assert experts.transfers(ideal(), TOKENS, HIDDEN) == bytes_per_link
    for part in (experts.forward, experts.backward):
        compute, total = (
            seconds(variant, lambda rank, part=part: part(rank, TOKENS, HIDDEN), ranks=1)
            for variant in (COMPUTE_ONLY, REFERENCE)
        )
        assert total == pytest.approx(compute + 2 * bytes_per_link)  # there and back


def test_a_layer_of_experts() -> None:
    """Also with shared experts; pairing micro-batches hides its transfers."""
    without, shared = (replace(DENSE, experts=replace(EXPERTS, shared=n)) for n in (0, 32))
    forms = [ways(shape, REFERENCE) for shape in (DENSE, without, shared)]
    for dense, experts, combined in zip(*forms, strict=True):
        assert max(dense, experts) < combined < dense + experts
    shape = replace(without, ranks=1)
    pair = seconds(FB_OVERLAP, lambda rank: fb_overlap.pair(rank, shape, 1, None), ranks=1)
    compute, plain = (sum(ways(shape, variant, ranks=1)) for variant in (COMPUTE_ONLY, MEGATRON))
    assert compute <= pair < plain

    def launches(experts: Experts) -> int:
        rank = Rank(ideal(), 0, 1, 1, MEGATRON)
        experts.forward(rank, TOKENS, HIDDEN)
        return sum(operation.launches for operation in rank.finish())

    # Without grouped GEMMs the experts are launched one by one.
    one_by_one = replace(EXPERTS, grouped=False)
    assert launches(one_by_one) - launches(EXPERTS) == 3 * (EXPERTS.local - 1)


@pytest.mark.parametrize("queries", [0, 12])
def test_latent_attention_makes_narrow_rows_once_and_wide_ones_by_heads(queries: int) -> None:
    latent = Latent(heads=8, queries=queries, keys=10, own=4, rotary=2, value=6, ranks=TP)
    held, wide = TOKENS // TP, 8 * 6 // TP
    flops = held * HIDDEN * (10 + 2) + TOKENS * 10 * 8 * (4 + 6) // TP
    if queries:
        flops += held * HIDDEN * queries + TOKENS * queries * wide
    else:
        flops += TOKENS * HIDDEN * wide
    computed = [
        seconds(COMPUTE_ONLY, lambda rank, part=part: part(rank, TOKENS, held, HIDDEN))
        for part in (latent.forward, latent.backward)
    ]
    assert computed == [2 * flops, 4 * flops]
    narrow = held * (queries + 12) * ITEM_BYTES
    total = seconds(REFERENCE, lambda rank: latent.forward(rank, TOKENS, held, HIDDEN))
    assert total == computed[0] + narrow
    # Scores over own and rotary features, then values: both products are causal.
    shape = replace(DENSE, latent=latent)
    attended = shape.attention(ideal())(slice(0, TOKENS))
    assert attended == TOKENS**2 * 8 * (4 + 2 + 6) / TP
    # A mask that is not causal doubles them.
    assert replace(shape, causal=False).attention(ideal())(slice(0, TOKENS)) == 2 * attended


def test_without_sequence_parallelism_sums_are_all_reduced_and_nothing_is_gathered() -> None:
    whole = replace(DENSE, sequence_parallel=False)
    compute = ways(whole, COMPUTE_ONLY)
    assert compute == ways(DENSE, COMPUTE_ONLY)  # memory traffic is free here
    sums = 2 * TOKENS // TP * ROW
    # Forward: proj and fc2; backward: qkv and fc1.
    exposed = ways(whole, REFERENCE)
    assert exposed == pytest.approx([time + 2 * sums for time in compute])
    # Megatron overlaps the all-reduce of dgrad with wgrad.
    assert ways(whole, MEGATRON)[1] < exposed[1]


# ------------------------------------------------------------------- Ulysses context parallelism

H, QKV, BLOCK = 64, 96, 120


def ulysses(
    machine: Machine, ranks: int, schedule: Schedule | None = None, part: str = "forward",
    tp: int = 1, key_value: int = 0, groups: int = 64, unfused: Variant = REFERENCE,
) -> Simulated:  # fmt: skip
    shape = LayerShape(BLOCK, ranks * BLOCK, 1, H, 128, QKV, 100, tp)
    variant = Variant("ulysses", "fused", schedule) if schedule else unfused
    context = ContextParallel(shape, ranks, key_value, groups, True, True)
    return Group(machine, ranks).simulate(variant, getattr(context, part), whole=True)


@settings(max_examples=30, deadline=None)
@given(speed=st.floats(0.01, 100.0))
def test_two_ranks_without_attention_take_the_closed_form(speed: float) -> None:
    machine = replace(ideal(), attention_efficiency=math.inf, cube_flops=speed)
    qkv, out = machine.gemm(BLOCK, H, QKV), machine.gemm(BLOCK, H, H)
    there, back = (BLOCK * width / 2 * ITEM_BYTES for width in (QKV, H))
    # The peer's heads are projected first; the own part of the output is used first.
    expected = max(qkv, qkv / 2 + there) + max(out / 2, back) + out / 2
    assert ulysses(machine, 2, Schedule("shifted", 1, 1)).seconds == pytest.approx(expected)
    # Without fusion the projections are not part of the exchange.
    assert ulysses(machine, 2).seconds == pytest.approx(there + back)


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize(("tp", "ranks"), [(1, 2), (1, 4), (2, 4)])
def test_bytes_and_work_do_not_depend_on_how_it_is_cut(part: str, tp: int, ranks: int) -> None:
    machine = replace(ideal(), cube_flops=50.0)
    cut = [Schedule("shifted", ranks - 1, chunks) for chunks in (1, 3)]
    fused = [ulysses(machine, ranks, schedule, part, tp) for schedule in cut]
    for simulated in (*fused, ulysses(machine, ranks, None, part, tp)):
        check_timeline(simulated)
        expected = (ranks - 1) / ranks * BLOCK * (QKV + H) / tp * ITEM_BYTES
        assert [sent(rank) for rank in simulated.launches] == [pytest.approx(expected)] * ranks
    assert work(fused[0]) == pytest.approx(work(fused[1]))
    # Projections are part of the exchange only if they are fused.
    compute = ulysses(machine, ranks, None, part, tp, unfused=COMPUTE_ONLY)
    assert (compute.seconds < work(fused[0])) is (tp == 1)
    assert compute.waiting == pytest.approx(0)


def test_heads_that_are_repeated_are_sent_more_often_and_not_projected() -> None:
    less, more = (
        ulysses(ideal(), 4, Schedule("shifted", 3, 1), key_value=16, groups=groups).launches[0]
        for groups in (4, 2)
    )
    assert any(operation.name == "qkv make" for operation in less)
    assert not any(operation.name == "qkv make" for operation in more)
    assert sent(more) - sent(less) == pytest.approx(3 / 4 * BLOCK * 2 * 16 * ITEM_BYTES)
