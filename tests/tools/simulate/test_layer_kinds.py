"""Experts, latent attention, context parallelism, no sequence parallelism, in closed form.

Links carry 1 byte/s, and the compute engine makes 1 FLOP/s.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.hardware.machine import ITEM_BYTES, Level, Machine
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.attention_layers import Latent, attend
from commfuse_npu.tools.simulate.engine import Links, Operation
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.rank import Rank, simulate
from commfuse_npu.tools.simulate.variants import (
    COMPUTE_ONLY,
    MEGATRON,
    OVERLAP,
    REFERENCE,
    Variant,
    fused,
)
from tests.tools.simulate.machines import IDEAL, check_timeline, ideal

TOKENS, HIDDEN, TP = 64, 16, 4
DENSE = LayerShape(TOKENS, TOKENS, 1, HIDDEN, 32, 48, 64, TP)
EXPERTS = Experts(number=8, each=2, width=24, shared=0, parallel=4, tensor=1)
ROW = HIDDEN * ITEM_BYTES


def seconds(
    variant: Variant, build: Callable[[Rank], None], ranks: int = TP, machine: Machine = IDEAL
) -> float:
    return simulate(Links(machine, ranks), variant, build).seconds


def operations(part: Callable[..., None], ranks: int, *sizes: int | LayerShape) -> list[Operation]:
    """What a part of a layer launches on a rank; memory takes a second per element."""
    rank = Rank(Links(ideal(hbm_bandwidth=float(ITEM_BYTES)), ranks), 0, MEGATRON)
    part(rank, *sizes)
    return rank.finish()


def elements(part: Callable[..., None], ranks: int, *sizes: int) -> float:
    """Elements that the element-wise work of a part of a layer reads and writes."""
    kinds = "latent heads", "sort", "activation"
    return sum(o.seconds for o in operations(part, ranks, *sizes) if o.name.endswith(kinds))


def ways(shape: LayerShape, variant: Variant, ranks: int = TP) -> list[float]:
    """Seconds of a layer, forward and backward."""
    passes = llama.forward, llama.backward
    return [seconds(variant, lambda rank, part=part: part(rank, shape), ranks) for part in passes]


@pytest.mark.parametrize(
    ("changes", "bytes_per_link"),
    [
        # To each of 4 ranks a quarter of 2 rows per token.
        ({}, TOKENS * 2 / 4 * ROW),
        # In addition, both ranks of a pair gather all rows that arrived.
        ({"tensor": 2, "halves": 2}, TOKENS * 2 / 4 * ROW + TOKENS * 2 * ROW),
        ({"gathers": True, "tensor": 2}, TOKENS * ROW),
        ({"parallel": 1}, 0),
    ],
)
def test_experts_compute_the_tokens_that_arrive(
    changes: dict[str, int], bytes_per_link: float
) -> None:
    """However experts are cut, a rank computes its share of all products."""
    experts = replace(EXPERTS, **changes)
    assert experts.transfers(ideal(), TOKENS, HIDDEN) == bytes_per_link
    work = 2 * TOKENS * HIDDEN * (8 + 2 * (experts.halves + 1) * 24)  # the router and the products
    for part, times in (experts.forward, 1), (experts.backward, 2):
        compute, total = (
            seconds(variant, lambda rank, part=part: part(rank, TOKENS, HIDDEN), ranks=1)
            for variant in (COMPUTE_ONLY, REFERENCE)
        )
        assert compute == times * work
        # Tokens are sorted before they are sent and, if a rank has several experts, on arrival.
        sorted_twice = 2 * 2 * HIDDEN * TOKENS * 2 * (1 + experts.tensor * (experts.local > 1))
        activated = TOKENS * 2 * 24 * (experts.halves + 1 if times == 1 else 2 * experts.halves + 1)
        assert elements(part, 1, TOKENS, HIDDEN) == sorted_twice + activated
        assert total == pytest.approx(compute + 2 * bytes_per_link)  # there and back


@pytest.mark.parametrize("halves", [1, 2])
def test_a_gate_is_read_and_has_a_gradient(halves: int) -> None:
    shape = replace(DENSE, halves=halves)
    elements = TOKENS * shape.dense
    found = [
        sum(o.seconds for o in operations(part, TP, shape) if o.name.startswith("activation"))
        for part in (llama.forward, llama.backward)
    ]
    # Read and write; read the gradient of the output, and write those of what was read.
    assert found == [elements * (halves + 1), elements * (2 * halves + 1)]


def test_a_layer_of_experts() -> None:
    shapes = (replace(DENSE, experts=replace(EXPERTS, shared=n)) for n in (0, 32))
    forms = [ways(shape, REFERENCE) for shape in (DENSE, *shapes)]
    for dense, experts, combined in zip(*forms, strict=True):
        assert max(dense, experts) < combined < dense + experts

    def launches(part: Callable[[Rank, int, int], None]) -> int:
        return sum(operation.launches for operation in operations(part, 1, TOKENS, HIDDEN))

    # Without grouped GEMMs the experts are launched one by one, and their gradients added up.
    one_by_one, local = replace(EXPERTS, grouped=False), EXPERTS.local
    starts = ideal(cube_flops=math.inf, gemm_start=1.0)
    for experts, started in ((EXPERTS, 1), (one_by_one, local)):
        build = partial(experts.forward, tokens=TOKENS, hidden=HIDDEN)
        assert seconds(COMPUTE_ONLY, build, 1, starts) == 1 + 2 * started
    assert launches(one_by_one.forward) - launches(EXPERTS.forward) == 3 * (local - 1)
    assert launches(one_by_one.backward) - launches(EXPERTS.backward) == 7 * local - 5


def test_attention_is_two_products_over_half_of_the_scores() -> None:
    whole = DENSE.attention(ideal())
    assert whole == 2 * TOKENS**2 * HIDDEN / TP
    assert replace(DENSE, causal=False).attention(ideal(), 2.5) == 5 * whole
    # Of a ring's ranks each has its queries; with Ulysses each has all for some heads.
    slow = ideal(half_rows=TOKENS)
    assert DENSE.attention(slow) == 2 * whole
    for ring, factor in ((True, 1 + 1), (False, 1 + 1 / 4)):
        shape = context_parallel(4, ring=ring)
        alone = shape.attention(ideal(half_rows=BLOCK))
        assert alone == pytest.approx(factor * shape.attention(ideal()))


@pytest.mark.parametrize("queries", [0, 12])
def test_latent_attention_splits_only_wide_rows_by_heads(queries: int) -> None:
    latent = Latent(heads=8, queries=queries, keys=10, own=4, rotary=2, value=6)
    held, wide = TOKENS // TP, 8 * 6 // TP
    flops = held * HIDDEN * (10 + 2) + TOKENS * 10 * 8 * (4 + 6) // TP
    if queries:
        flops += held * HIDDEN * queries + TOKENS * queries * wide
    else:
        flops += TOKENS * HIDDEN * wide
    # Every feature has a weight for each of the narrow products, and for the heads' values.
    query = 8 * (4 + 2)
    widths = HIDDEN * (12 + (queries or query) + 8 * 6), 10 * 8 * (4 + 6) + queries * query
    per_feature, besides = latent.parameters
    assert (HIDDEN * per_feature, besides) == widths
    computed = [
        seconds(COMPUTE_ONLY, lambda rank, part=part: part(rank, TOKENS, held, HIDDEN))
        for part in (latent.forward, latent.backward)
    ]
    assert computed == [2 * flops, 4 * flops]
    # Queries, keys and values of a rank's heads are read and written twice.
    for part in (latent.forward, latent.backward):
        assert elements(part, TP, TOKENS, held, HIDDEN) == 4 * TOKENS * 8 * (2 * (4 + 2) + 6) // TP
    narrow = held * (queries + 12) * ITEM_BYTES
    total = seconds(REFERENCE, lambda rank: latent.forward(rank, TOKENS, held, HIDDEN))
    assert total == computed[0] + narrow
    # Scores over own and rotary features, then values: both products are causal.
    shape = replace(DENSE, latent=latent)
    attended = shape.attention(ideal())
    assert attended == TOKENS**2 * 8 * (4 + 2 + 6) / TP
    # A mask that is not causal doubles them.
    assert replace(shape, causal=False).attention(ideal()) == 2 * attended


def test_without_sequence_parallelism_sums_are_all_reduced() -> None:
    whole = replace(DENSE, sequence_parallel=False)
    compute = ways(whole, COMPUTE_ONLY)
    assert compute == ways(DENSE, COMPUTE_ONLY)  # memory traffic is free here
    sums = 2 * TOKENS // TP * ROW
    # Forward: proj and fc2; backward: qkv and fc1.
    exposed = ways(whole, REFERENCE)
    assert exposed == pytest.approx([time + 2 * sums for time in compute])
    # Megatron overlaps the all-reduce of dgrad with wgrad.
    assert ways(whole, MEGATRON)[1] < exposed[1]


# ------------------------------------------------------------------- context parallelism

H, QKV, KEY_VALUE, BLOCK = 64, 96, 16, 120


def context_parallel(size: int, tp: int = 1, groups: int = 64, ring: bool = False) -> LayerShape:
    more = {"groups": groups, "ulysses": not ring}
    return LayerShape(BLOCK, size * BLOCK, 1, H, 128, QKV, 100, tp, **more)


def attended(machine: Machine, shape: LayerShape, way: int, variant: Variant = MEGATRON) -> float:
    return seconds(variant, partial(attend, shape=shape, way=way), shape.ranks, machine)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("speed", [1e3, 1e5])
@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_round_takes_the_longer_of_attention_and_transfer(
    size: int, speed: float, way: int
) -> None:
    machine, shape = ideal(cube_flops=speed), context_parallel(size, ring=True)
    attention = attended(machine, shape, way, COMPUTE_ONLY) / size
    # Keys and values go around; backward, their gradients as well.
    transfer = (1 + way) * 2 * BLOCK * KEY_VALUE * ITEM_BYTES
    # Nothing is sent during the attention over the last block.
    expected = (size - 1) * max(attention, transfer) + attention
    assert attended(machine, shape, way) == pytest.approx(expected)
    # Between nodes a link is as slow as it is described.
    slow = replace(machine, npus_per_node=2, between=Level("nic_per_npu", 0.25, 0.0))
    late = (size - 1) * max(attention, 4 * transfer) + attention
    assert attended(slow, shape, way) == pytest.approx(late if size > 2 else expected)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize(("tp", "size"), [(1, 2), (1, 4), (2, 4)])
def test_ulysses_exchanges_heads_before_and_rows_after_attention(
    tp: int, size: int, way: int
) -> None:
    shape = context_parallel(size, tp)
    alone = attended(ideal(), shape, way, COMPUTE_ONLY)
    # To each peer its share of the heads, over a link of its own.
    exchanged = BLOCK * (QKV + H) / tp / size * ITEM_BYTES
    assert attended(ideal(), shape, way) == pytest.approx(alone + exchanged)
    # A key head that several ranks need is sent to each of them.
    less, more = (
        attended(ideal(), context_parallel(size, tp, groups), way)
        for groups in (size * tp, size * tp // 2)
    )
    assert more - less == pytest.approx(BLOCK * 2 * KEY_VALUE / tp / size * ITEM_BYTES)


@pytest.mark.parametrize(
    ("shape", "hides"),
    [
        (replace(DENSE, experts=EXPERTS, ranks=1), True),
        (context_parallel(4), True),
        (context_parallel(4, ring=True), False),
    ],
)
def test_passes_hide_all_to_alls_but_not_a_ring(shape: LayerShape, hides: bool) -> None:
    machine = ideal(cube_flops=2e3)
    layer = Layers(shape, 1)
    in_turns = partial(take_turns, chunk=[layer], forward=True, backward=True)
    together = seconds(OVERLAP, in_turns, 1, machine)
    free, plain = (
        sum(
            seconds(variant, partial(part, shape=shape), 1, machine)
            for part in (llama.forward, llama.backward)
        )
        for variant in (COMPUTE_ONLY, MEGATRON)
    )
    assert free <= together
    assert together < plain if hides else together == pytest.approx(plain)


def test_transfers_of_other_groups_go_beside_fused_layers() -> None:
    """Every rank of a group that is simulated as a whole has its own."""
    variant = fused(Schedule("shifted", 3, 1))
    for shape in (replace(DENSE, experts=EXPERTS), context_parallel(2, TP)):
        for part in (llama.forward, llama.backward):
            simulated = simulate(
                Links(ideal(), TP), variant, partial(part, shape=shape), whole=True
            )
            check_timeline(simulated)
            elsewhere = [
                moved for moved in simulated.moved
                if moved.message.source == moved.message.target
            ]  # fmt: skip
            assert len(elsewhere) == 2 * TP
