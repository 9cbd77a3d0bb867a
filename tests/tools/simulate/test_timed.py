"""Rows of a table, and what they say together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import Footprint
from commfuse_npu.tools.simulate.step import Layout
from commfuse_npu.tools.simulate.timed import Timed, best, ratio, table, timed, verdict
from commfuse_npu.tools.simulate.training import training
from commfuse_npu.tools.simulate.variants import forms

SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
MODEL = ModelConfig.load(find_config("llama3_8b"))
SETUP = training(MODEL, Layout(8, 1, 1, 1), 8192, micro_batch=1, micro_batches=2)
FORMS = {form.name: form for form in forms(SERVER.machine(), SETUP)}
GIB = 2.0**30
STEPS = {
    "plain-mesh": 20.0, "megatron": 18.0, "coc-4": 17.0, "commfuse-tuned": 16.2,
    "commfuse-rounded": 14.4, "compute": 10.0,
}  # fmt: skip


def rows(steps: dict[str, float]) -> list[Timed]:
    """A row per form, on a typical machine and one that is twice as slow but for ``coc-4``."""
    memory = Footprint(GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)
    return [
        Timed(SETUP, FORMS[name], (s, s if name == "coc-4" else 2 * s), (s - 10, s), memory)
        for name, s in steps.items()
    ]


def test_forms_are_those_of_a_launch() -> None:
    """Plain collectives come first, the bound last; a group has those that support it."""
    names = ["plain-mesh", "megatron", "coc-2", "coc-4", "coc-8", "coc-fused", "mc2", "commfuse",
             "commfuse-tuned", "commfuse-rounded", "commfuse-fb", "compute"]  # fmt: skip
    assert list(FORMS) == names
    assert [name for name, form in FORMS.items() if form.flags is None] == [names[0], names[-1]]
    assert [name for name, form in FORMS.items() if not form.exact] == ["commfuse-rounded"]
    sizes = {1: {"coc-2", "coc-fused", "mc2", "commfuse"}, 4: {"coc-fused"}, 16: {"mc2"}}
    wide = replace(MODEL, num_query_groups=16)
    for tp, missing in sizes.items():
        job = training(wide, Layout(tp, 1, 1, 1), 8192)
        found = {form.name for form in forms(SERVER.machine(), job)}
        assert not found & missing
        assert {"megatron", "commfuse-fb"} < found
    # With few rows --use-commfuse keeps Megatron's order.
    short = training(MODEL, Layout(8, 1, 1, 1), 2048)
    (launched,) = (f for f in forms(SERVER.machine(), short) if f.name == "commfuse")
    assert (launched.kind, launched.flags) == ("megatron", "--use-commfuse")
    many = training(MODEL, Layout(8, 1, 1, 1), 32768)
    assert [f.kind for f in forms(SERVER.machine(), many) if f.name == "commfuse"] == ["fused"]


def test_the_shortest_that_keeps_the_bits_and_can_be_launched_is_bold() -> None:
    found = rows(STEPS)
    assert best(found).form.name == "commfuse-tuned"
    lines = table(found).splitlines()
    assert [line for line in lines if "**" in line] == [
        "| 8 | 1 | 1 | 1 | none | **commfuse-tuned** | 16.20 s (16.20 s .. 32.40 s) | - | "
        f"6.20 s (6.20 s .. 16.20 s) | {8192 * 2 / 8 / 16.2:.0f} "
        f"({8192 * 2 / 8 / 32.4:.0f} .. {8192 * 2 / 8 / 16.2:.0f}) | 15.0 GiB |"
    ]
    assert len(lines) == 2 + len(STEPS)
    # By how much longer than this one, and on how many of the two machines.
    for form, longer in (("coc-4", "+4.9% (1 of 2)"), ("megatron", "+11.1% (2 of 2)"),
                         ("commfuse-rounded", "-11.1% (0 of 2)")):  # fmt: skip
        assert [f"| {longer} |" in line for line in lines if f"| {form} |" in line] == [True]


def test_the_verdict_names_the_best_its_ratio_and_its_memory() -> None:
    at = "Recommended: TP 8, CP 1, PP 1, DP 1"
    first, empty, shares, memory = verdict(rows(STEPS), SERVER)
    assert first == f"{at}, commfuse-tuned, a step in 16.20 s (16.20 s .. 32.40 s)."
    assert empty == ""
    low, typical, high = ratio(SETUP, SERVER)
    assert 0 < low < typical < high
    pair = ratio(SETUP, SERVER, 2).text("{:.2f}".format)
    assert shares == f"- Communication / computation of a layer, plain: {pair}."
    assert "GiB: weights 1.0, gradients 2.0, optimizer 3.0, activations 4.0, comm" in memory
    first, *_ = verdict(rows({**STEPS, "megatron": 9.0}), SERVER)
    assert first.startswith(f"{at}, megatron, a step in 9.00 s")


def test_what_an_npu_has_no_memory_for_is_not_recommended() -> None:
    found = [replace(row, fits=row.form.name != "commfuse-tuned") for row in rows(STEPS)]
    assert best(found).form.name == "coc-4"
    assert table(found).count("15.0 GiB, too much |") == 1
    first, *_ = verdict(found, SERVER)
    assert first.startswith("Recommended: TP 8, CP 1, PP 1, DP 1, coc-4")
    first, *_ = verdict([replace(row, fits=False) for row in found], SERVER)
    assert first.startswith("No form fits 57.6 GiB (90% of an NPU): choose larger sizes")
    large = training(replace(MODEL, num_layers=320), SETUP.layout, 8192, micro_batches=1)
    sizes = [timed(job, FORMS["megatron"], SERVER, corners=1).fits for job in (SETUP, large)]
    assert sizes == [True, False]


def test_a_row_is_what_is_simulated() -> None:
    typical = timed(SETUP, FORMS["mc2"], SERVER, corners=1)
    row = timed(SETUP, FORMS["mc2"], SERVER)
    assert row.typical == typical.typical
    assert len(row.seconds) == len(row.exposed) == 5
    content = row.as_json()
    assert content["step"] == {
        "low": min(row.seconds), "typical": row.typical, "high": max(row.seconds)
    }  # fmt: skip
    assert content["tokens"]["typical"] == pytest.approx(8192 * 2 / 8 / row.typical)
    assert content["flags"] == ["--use-ascend-mc2"]
    bound = timed(SETUP, FORMS["compute"], SERVER)
    for with_transfers, without, exposed in zip(
        row.seconds, bound.seconds, row.exposed, strict=True
    ):
        assert exposed == pytest.approx(with_transfers - without)
