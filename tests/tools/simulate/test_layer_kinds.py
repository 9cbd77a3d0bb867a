"""Experts, latent attention and layers without sequence parallelism, in closed form.

Links carry 1 byte/s, and the compute engine makes 1 FLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate import llama, turns
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.latent import Latent
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, MEGATRON, REFERENCE, TURNS, Variant
from tests.tools.simulate.machines import ideal

TOKENS, HIDDEN, TP = 64, 16, 4
DENSE = LayerShape(TOKENS, TOKENS, 1, HIDDEN, 32, 48, 64, TP)
EXPERTS = Experts(number=8, each=2, width=24, shared=0, parallel=4, tensor=1)
ROW = HIDDEN * ITEM_BYTES


def seconds(variant: Variant, build: Callable[[Rank], None], ranks: int = TP) -> float:
    return Group(ideal(), ranks).play(variant, build, steady=True).seconds


def ways(shape: LayerShape, variant: Variant, ranks: int = TP) -> list[float]:
    """Seconds of a layer, forward and backward."""
    both = llama.forward, llama.backward
    return [seconds(variant, lambda rank, of=of: of(rank, shape), ranks) for of in both]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("halves", [1, 2])
def test_products_of_experts_are_those_of_the_tokens_that_arrive(tensor: int, halves: int) -> None:
    """However experts are cut, a rank makes its share of all products."""
    experts = replace(EXPERTS, tensor=tensor, halves=halves)
    router = 2 * TOKENS * HIDDEN * 8
    products = 2 * TOKENS * 2 * (halves + 1) * HIDDEN * 24
    for of, times in (experts.forward, 1), (experts.backward, 2):
        found = seconds(COMPUTE_ONLY, lambda rank, of=of: of(rank, TOKENS, HIDDEN))
        assert found == times * (router + products)


@pytest.mark.parametrize(
    ("changes", "bytes_per_link"),
    [
        # To each of 4 ranks a quarter of 2 rows per token.
        ({}, TOKENS * 2 / 4 * ROW),
        # Besides, the other rank of two gathers all that arrived.
        ({"tensor": 2}, TOKENS * 2 / 4 * ROW + TOKENS * 2 * ROW),
        ({"gathers": True, "tensor": 2}, TOKENS * ROW),
        ({"parallel": 1}, 0),
    ],
)
def test_rows_to_experts_go_over_their_own_links(changes, bytes_per_link: float) -> None:
    experts = replace(EXPERTS, **changes)
    assert experts.transfers(ideal(), TOKENS, HIDDEN) == bytes_per_link
    for of in (experts.forward, experts.backward):
        work, both = (
            seconds(variant, lambda rank, of=of: of(rank, TOKENS, HIDDEN), ranks=1)
            for variant in (COMPUTE_ONLY, REFERENCE)
        )
        assert both == pytest.approx(work + 2 * bytes_per_link)  # there and back


def test_experts_by_themselves_are_launched_one_by_one() -> None:
    def launches(experts: Experts) -> int:
        rank = Rank(ideal(), 0, 1, 1, MEGATRON)
        experts.forward(rank, TOKENS, HIDDEN)
        return sum(one.launches for one in rank.finish())

    alone = replace(EXPERTS, grouped=False)
    assert launches(alone) - launches(EXPERTS) == 3 * (alone.local - 1)


def test_a_layer_of_experts() -> None:
    """With shared experts as its feed-forward part; its transfers hide where sides take turns."""
    without, shared = (replace(DENSE, experts=replace(EXPERTS, shared=n)) for n in (0, 32))
    for dense, experts, both in zip(
        ways(DENSE, REFERENCE), ways(without, REFERENCE), ways(shared, REFERENCE), strict=True
    ):
        assert max(dense, experts) < both < dense + experts
    shape = replace(without, ranks=1)
    pair = seconds(TURNS, lambda rank: turns.pair(rank, shape, 1, None), ranks=1)
    work, plain = (sum(ways(shape, variant, ranks=1)) for variant in (COMPUTE_ONLY, MEGATRON))
    assert work <= pair < plain


@pytest.mark.parametrize("queries", [0, 12])
def test_latent_attention_makes_narrow_rows_once_and_wide_ones_by_heads(queries: int) -> None:
    latent = Latent(heads=8, queries=queries, keys=10, own=4, rotary=2, value=6, ranks=TP)
    held, wide = TOKENS // TP, 8 * 6 // TP
    flops = held * HIDDEN * (10 + 2) + TOKENS * 10 * 8 * (4 + 6) // TP
    if queries:
        flops += held * HIDDEN * queries + TOKENS * queries * wide
    else:
        flops += TOKENS * HIDDEN * wide
    found = [
        seconds(COMPUTE_ONLY, lambda rank, of=of: of(rank, TOKENS, held, HIDDEN))
        for of in (latent.forward, latent.backward)
    ]
    assert found == [2 * flops, 4 * flops]
    narrow = held * (queries + 12) * ITEM_BYTES
    assert seconds(REFERENCE, lambda rank: latent.forward(rank, TOKENS, held, HIDDEN)) == (
        found[0] + narrow
    )
    # Scores over own and rotary features, values over theirs: causal, both products.
    attended = replace(DENSE, latent=latent).attention(ideal())(slice(0, TOKENS))
    assert attended == TOKENS**2 * 8 * (4 + 2 + 6) / TP
    # A mask that is not causal doubles them.
    full = replace(DENSE, latent=latent, causal=False).attention(ideal())(slice(0, TOKENS))
    assert full == 2 * attended


def test_without_sequence_parallelism_sums_are_all_reduced_and_nothing_is_gathered() -> None:
    whole = replace(DENSE, sequence_parallel=False)
    work, split = ways(whole, COMPUTE_ONLY), ways(DENSE, COMPUTE_ONLY)
    assert work == split  # memory traffic is free here
    sums = 2 * TOKENS // TP * ROW
    forward, backward = ways(whole, REFERENCE)
    assert forward == pytest.approx(work[0] + 2 * sums)  # of proj and fc2
    assert backward == pytest.approx(work[1] + 2 * sums)  # of qkv and fc1
    # Megatron has the sum of dgrad on its way during wgrad.
    assert ways(whole, MEGATRON)[1] < backward
