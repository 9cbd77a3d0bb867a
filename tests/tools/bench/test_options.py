"""Names of variants, the programme, and what the command refuses."""

from __future__ import annotations

import argparse

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench import programme
from commfuse_npu.tools.bench.arguments import parser
from commfuse_npu.tools.bench.variants import REFERENCE, applies_to, chosen, of_group


def _given(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


def _names(patterns: list[str], size: int) -> list[str]:
    return [variant.name for variant in chosen(patterns, size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_variants_have_names_of_their_own_and_lanes_that_are_used(size: int) -> None:
    variants = of_group(size)
    assert len({variant.name for variant in variants}) == len(variants)
    assert len(set(variants)) == len(variants)
    for variant in variants:
        if variant.schedule is not None:
            lanes = {hop.lane for hop in variant.schedule.hops(0, size, "first")}
            assert len(lanes) == variant.schedule.lanes <= size - 1


def test_chunks_tapers_and_lanes_have_names() -> None:
    ours = {variant.name: variant.schedule for variant in of_group(4)}
    assert (ours["ours-c4"].lanes, ours["ours-c8-l1"].lanes) == (3, 1)
    assert (ours["ours-c6-t1.5"].chunks, ours["ours-c6-t1.5"].taper) == (6, 1.5)
    assert (ours["ours-c4-t0.5"].chunks, ours["ours-c4-t0.5"].taper) == (4, 0.5)
    assert _names(["ours-c?"], 2) == [REFERENCE, "ours-c1", "ours-c2", "ours-c4", "ours-c8"]


def test_the_reference_is_always_measured() -> None:
    assert _names(["coc-4"], 2) == [REFERENCE, "coc-4"]


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="'ours-c3'; choose from p2p, collective"):
        chosen(["ours-c3"], 2)


def test_megatrons_order_needs_a_backward() -> None:
    megatron = next(variant for variant in of_group(2) if variant.name == "megatron")
    assert applies_to(megatron, "mlp")
    assert not applies_to(megatron, "all-gather")


def test_options_make_a_programme_of_their_own() -> None:
    given = _given("--ranks", "2,4", "--sleep-gemm", "10", "--works", "mlp")
    sweeps = programme.with_options(programme.quick(), given)
    assert [(s.ranks, s.gflops, s.works) for s in sweeps] == [
        (2, 10.0, ("mlp",)),
        (4, 10.0, ("mlp",)),
    ]
    assert "sleeping" in sweeps[0].mode


def test_micro_batches_are_measured_with_the_overlap_made_for_them() -> None:
    (sweep,) = programme.with_options(programme.full(), _given("--ranks", "2"))
    named = [one for one in chosen(sweep.variants, 2) if one.name == "fb-overlap"]
    assert [one for one in named if applies_to(one, "micro-batches")] == named != []


def test_options_replace_values_of_the_programme() -> None:
    sweeps = programme.with_options(programme.full(), _given("--ratios", "0.5"))
    assert all(sweep.ratios == (0.5,) for sweep in sweeps)
    assert {sweep.ranks for sweep in sweeps} == {2, 4, 8}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--works", "mlp,none"], "--works none: choose from all-gather"),
        (["--variants", "best"], "no variant for 2 ranks is called 'best'"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--device", "npu", "--sleep-gemm", "9"], "leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(words, reason, capsys) -> None:
    assert cli.main(["bench", *words]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--ranks", "1"], ["--ratios", "-1"], ["--rounds", "0"], ["--sleep-gemm", "0"]]
)
def test_values_out_of_range_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *words])
    assert left.value.code == 2
