"""Names of variants, and the sweeps that options select."""

from __future__ import annotations

import argparse

import pytest

from commfuse_npu.tools.bench.command import parser
from commfuse_npu.tools.bench.sweep import full, quick, with_options
from commfuse_npu.tools.bench.variants import REFERENCE, chosen, of_group


def _given(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_variants_have_names_of_their_own_and_lanes_that_are_used(size: int) -> None:
    variants = of_group(size)
    assert len({variant.name for variant in variants}) == len(variants) == len(set(variants))
    for variant in variants:
        if variant.schedule is not None:
            lanes = {hop.lane for hop in variant.schedule.hops(0, size, "first")}
            assert len(lanes) == variant.schedule.lanes <= size - 1


def test_patterns_choose_and_the_reference_is_always_measured() -> None:
    selected = chosen(["ours-c?", "co*"], 2)
    assert [variant.name for variant in selected if variant.direct] == [
        REFERENCE,
        *map("ours-c{}".format, (1, 2, 4, 8)),
    ]
    torchs = [(variant.name, variant.slices) for variant in selected if not variant.direct]
    assert torchs == [("collective", 1), ("coc-2", 2), ("coc-4", 4), ("coc-8", 8)]
    with pytest.raises(ValueError, match="'ours-c3'; choose from p2p, collective"):
        chosen(["ours-c3"], 2)


@pytest.mark.parametrize(
    ("name", "works"),
    [("megatron", "mlp layer micro-batches"), ("ours-c4-wgrad", "mlp layer micro-batches"),
     ("fb-overlap", "micro-batches"), ("p2p", "all-gather mlp layer micro-batches")],
)  # fmt: skip
def test_some_variants_need_a_backward_or_micro_batches(name: str, works: str) -> None:
    (variant,) = (v for v in of_group(2) if v.name == name)
    all_works = ("all-gather", "mlp", "layer", "micro-batches")
    assert " ".join(work for work in all_works if variant.applies_to(work)) == works


def test_options_make_a_programme_of_their_own_or_replace_values() -> None:
    args = _given("--ranks", "2,4", "--sleep-gemm", "10", "--works", "mlp")
    sweeps = with_options(quick(), args)
    assert [(s.ranks, s.gflops, s.works) for s in sweeps] == [
        *((2, 10.0, ("mlp",)), (4, 10.0, ("mlp",))),
    ]
    assert sweeps[0].mode == "sleeping GEMMs (10 GFLOPS modelled)"
    (sweep,) = with_options(full(), _given("--ranks", "2"))
    assert "fb-overlap" in sweep.variants
    assert (sweep.gflops, sweep.dtype) == (None, "fp32")
    sweeps = with_options(full(), _given("--ratios", "0.5", "--rounds", "1"))
    assert {(sweep.ratios, sweep.rounds) for sweep in sweeps} == {((0.5,), 1)}
    assert {sweep.ranks for sweep in sweeps} == {2, 4, 8}
