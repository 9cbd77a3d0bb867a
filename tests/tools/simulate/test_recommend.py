"""Rows of a table and what they say together; recommended layouts, and their flags."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Figure, Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.asked_launch import ask_about
from commfuse_npu.tools.plan.obstacles import obstacles
from commfuse_npu.tools.simulate.footprint import Footprint, footprint, limit
from commfuse_npu.tools.simulate.recommend import (
    Fixed,
    NoLayoutError,
    options,
    planned,
    recommend,
    write_plan,
)
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.timed import Timed, best, ratio, show, table, timed
from commfuse_npu.tools.simulate.training import Layout, Training, training
from commfuse_npu.tools.simulate.variants import MC2, OVERLAP, Variant, forms
from tests.launchers.launching import dry_run

SERVER = Hardware.find("ascend_910b_server")
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
LLAMA3_70B = ModelConfig.load(find_config("llama3_70b"))
WIDE = replace(LLAMA3_8B, num_query_groups=32)
SMALL = replace(LLAMA3_8B, seq_length=2048, global_batch_size=8)
"""Short sequences and a small batch, which take less time to simulate."""
SETUP = training(LLAMA3_8B, Layout(8, 1, 1, 1), 8192, micro_batch=1, micro_batches=2)
SIMULATED = {form.name: form for form in forms(SERVER.machine(), SETUP)}
GIB = 2.0**30
STEPS = {
    "blocking collectives": 20.0, "Megatron's order": 18.0, "CoC in 4 slices": 17.0,
    "fused layers, tuned": 16.2, "no communication": 10.0,
}  # fmt: skip


def made_up(steps: dict[str, float]) -> list[Timed]:
    """A row per form, on a typical machine and one that is twice as slow but for ``coc-4``."""
    memory = Footprint(GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB)
    return [
        Timed(SETUP, SIMULATED[name], (s, s if name == "CoC in 4 slices" else 2 * s), memory)
        for name, s in steps.items()
    ]


def test_forms_are_those_of_a_launch() -> None:
    """Plain collectives come first, the bound last; a group has those that support it."""
    names = ["blocking collectives", "Megatron's order", "CoC in 2 slices", "CoC in 4 slices",
             "CoC in 8 slices", "CoC's kernel", "MC2", "fused layers", "fused layers, tuned",
             "overlap", "no communication"]  # fmt: skip
    assert list(SIMULATED) == names
    assert [name for name, form in SIMULATED.items() if not form.launched] == [names[0], names[-1]]
    sizes = {1: {"CoC in 2 slices", "CoC's kernel", "MC2", "fused layers"}, 4: {"CoC's kernel"}}
    for tp, missing in sizes.items():
        job = training(LLAMA3_8B, Layout(tp, 1, 1, 1), 8192)
        found = {form.name for form in forms(SERVER.machine(), job)}
        assert not found & missing
        assert {"Megatron's order", "overlap"} < found
    # With few rows --use-commfuse keeps Megatron's order.
    short = training(LLAMA3_8B, Layout(8, 1, 1, 1), 2048)
    (launched,) = (f for f in forms(SERVER.machine(), short) if f.name == "fused layers")
    assert (launched.kind, launched.flags) == ("megatron", "--use-commfuse")
    many = training(LLAMA3_8B, Layout(8, 1, 1, 1), 32768)
    assert [f.kind for f in forms(SERVER.machine(), many) if f.name == "fused layers"] == ["fused"]


@pytest.mark.parametrize(
    ("steps", "too_large", "first", "saved"),
    [
        (STEPS, [], "fused layers, tuned, a step in 16.20 s (16.20 to 32.40).",
         {"CoC in 4 slices": "5.6 % (5.6 to 52.8)", "Megatron's order": "reference",
          "fused layers, tuned": "10.0 %", "no communication": "44.4 %"}),
        ({**STEPS, "Megatron's order": 9.0}, [], "Megatron's order, a step in 9.00 s",
         {"fused layers, tuned": "-80.0 %"}),
        # What an NPU has no memory for is not recommended.
        (STEPS, ["fused layers, tuned"], "CoC in 4 slices, a step in 17.00 s",
         {"fused layers, tuned": "10.0 %"}),
    ],
)  # fmt: skip
def test_the_verdict_names_the_fastest_form_with_the_same_bits(
    steps: dict[str, float], too_large: list[str], first: str, saved: dict[str, str], capsys
) -> None:
    rows = [replace(row, fits=row.form.name not in too_large) for row in made_up(steps)]
    show(rows, SERVER, "llama3_8b", "")
    said, empty, shares, memory, *_ = capsys.readouterr().out.splitlines()
    assert said.startswith(f"Recommended: TP 8, CP 1, PP 1, DP 1, {first}")
    assert empty == ""
    share = ratio(SETUP, SERVER, 2).text("{:.2f}".format)
    assert shares == f"- Communication / computation of a layer, plain: {share}."
    assert "GiB: weights 1.0, gradients 2.0, optimizer 3.0, activations 4.0, comm" in memory
    # The first is bold; each has how much less time it takes.
    lines = table(rows).replace("**", "").splitlines()
    (bold,) = [line for line in table(rows).splitlines() if "**" in line]
    assert f"| **{best(rows).form.name}** |" in bold
    assert best(rows).form.name == first.split(", a step")[0]
    for form, text in saved.items():
        assert [f"| {text} |" in line for line in lines if f"| {form} |" in line] == [True]
    assert table(rows).count("15.0, too much |") == len(too_large)
    large = training(replace(LLAMA3_8B, num_layers=320), SETUP.layout, 8192, micro_batches=1)
    assert not timed(large, SIMULATED["Megatron's order"], SERVER, 1).fits
    show([replace(row, fits=False) for row in rows], SERVER, "llama3_8b", "")
    assert capsys.readouterr().out.startswith(
        "No form fits 57.6 GiB (90% of an NPU): choose larger sizes"
    )


# ------------------------------------------------------------------- layouts


def test_layouts_are_ranked_by_the_time_of_a_step(tmp_path: Path) -> None:
    rows, fitting = recommend(SMALL, SERVER, 4, fixed=Fixed(cp=1, pp=1))
    steps = [row.typical for row in rows]
    assert steps == sorted(steps)
    assert best(rows) is rows[0]
    ours = [row for row in rows if row.form.ours]
    assert len({row.training.layout for row in rows}) > 1
    assert len({row.training.layout for row in ours}) == len(ours)
    for row in rows:
        assert row.training.layout.npus == 4
        assert row.memory.total <= limit(SERVER)
        # The reported time is the simulated one, on every machine.
        assert row.typical == TrainingStep(SERVER.machine(), row.training).time(row.form)
        assert len(row.seconds) == 5
        assert row.form.launched
    # No other form that fits is shorter.
    for row in {row.training.layout: row for row in reversed(rows)}.values():
        step = TrainingStep(SERVER.machine(), row.training)
        launched = [form for form in forms(step.machine, row.training) if form.launched]
        memory = {form: footprint(row.training, form, SERVER).total for form in launched}
        assert row.typical == min(step.time(f) for f in launched if memory[f] <= limit(SERVER))
    assert any(not row.form.ours for row in rows), "the best without CommFuse is among them"
    assert re.match(r"\d layouts fit 57.6 GiB \(90% of an NPU\); not: \d x more memory", fitting)
    first, file = next(row for row in rows if row.form == OVERLAP), tmp_path / "small.yaml"
    plan = planned(SMALL, SERVER, first.training, first.form)
    write_plan(file, plan, first, SERVER)
    assert ModelConfig.load(file) == plan
    words = options(SMALL, plan)
    ours = words[words.index("--commfuse-overlap") :]
    assert " ".join(ours) in " ".join(dry_run("llama3_8b", CONFIG=str(file)))
    assert "--commfuse-overlap" in ask_about(file, [], {}).options


def test_pipelines_are_interleaved_where_that_is_faster() -> None:
    model = replace(SMALL, num_layers=8, global_batch_size=4)
    rows, fitting = recommend(model, SERVER, 2, fixed=Fixed(tp=1, cp=1, pp=2))
    first = best(rows)
    assert fitting.startswith("1 layouts fit"), "layouts that differ in their chunks count once"
    assert first.training.layout == Layout(1, 1, 1, 2, vpp=4)
    words = options(model, planned(model, SERVER, first.training, first.form))
    assert words[words.index("--num-layers-per-virtual-pipeline-stage") + 1] == "1"
    assert first.name.startswith("TP 1, CP 1, PP 2x4, DP 1")
    # Interleaving holds more activations than plain 1F1B.
    less = footprint(replace(first.training, vpp=1), first.form, SERVER)
    assert first.memory.activations > less.activations
    # Three micro-batches do not go through two stages two at a time.
    odd, _ = recommend(replace(model, global_batch_size=6), SERVER, 2, fixed=Fixed(1, 1, 2))
    assert best(odd).training.layout == Layout(1, 1, 1, 2)
    # Nor do stages of different lengths have chunks of one length.
    uneven = replace(model, pipeline_model_parallel_size=2, num_layer_list=(2, 6))
    rows, _ = recommend(uneven, SERVER, 2, fixed=Fixed(1, 1, 2))
    assert {row.training.layout for row in rows} == {Layout(1, 1, 1, 2)}


@pytest.mark.parametrize(("gib", "full"), [(18.0, False), (14.0, True)])
def test_memory_decides_on_recomputation(gib: float, full: bool) -> None:
    model, size = replace(LLAMA3_8B, global_batch_size=2, num_layers=4), gib * 2.0**30
    figures = {**SERVER.figures, "npu.hbm_bytes": Figure(size, size, size, "assumed")}
    small, sizes = replace(SERVER, figures=figures), {"tp": 4, "cp": 1, "pp": 1}
    rows, _ = recommend(model, small, 4, fixed=Fixed(**sizes))
    first = best(rows)
    assert first.training.recomputes is full
    words = options(model, planned(model, small, first.training, first.form))
    assert ("--recompute-granularity" in words) is full
    if full:
        with pytest.raises(NoLayoutError, match="1 x more memory than an NPU has"):
            recommend(model, small, 4, fixed=Fixed(**sizes, recompute="none"))


@pytest.mark.parametrize(
    ("model", "hardware", "npus", "fixed", "said"),
    [
        (LLAMA3_70B, SERVER, 2, {}, r"fits 8192 tokens and .*: 4 x more memory than an NPU has; "),
        (LLAMA3_8B, SERVER, 8200, {}, "8200 NPUs are more than the 8192 of 1024 nodes of 8 in"),
        (LLAMA3_8B, SERVER, 6, {"tp": 6}, "1 x 32 attention heads, 8 query groups and feed-"),
        (LLAMA3_8B, SERVER, 20, {}, "--npus 20 is more than a host of 8 .* choose 16 or 24"),
        (
            LLAMA3_8B,
            SERVER,
            8,
            {"tp": 2, "pp": 3},
            "of 64: the fixed sizes do not divide",
        ),
        (WIDE, SERVER, 16, {"tp": 16}, "of 16 spans nodes of 8 NPUs"),
    ],
)
def test_nothing_fits(model, hardware, npus: int, fixed: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recommend(model, hardware, npus, fixed=Fixed(**fixed))


def test_what_is_written_describes_what_was_simulated() -> None:
    job = training(LLAMA3_70B, Layout(8, 1, 2, 4))
    words = "--recompute-num-layers", "2", "--seed", "1"
    model = replace(LLAMA3_70B, pretrain_options=words)
    ours, other = (planned(model, SERVER, job, form) for form in (OVERLAP, MC2))
    assert (ours.nnodes, ours.npus_per_node) == (8, 8)
    assert ours.pretrain_options[:2] == ("--seed", "1")
    assert "--recompute-num-layers" not in ours.pretrain_options
    # Flags of others are options of pretrain_gpt.py.
    assert other.pretrain_options == (*ours.pretrain_options, "--use-ascend-mc2")
    assert other.commfuse_options == ()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "plan.json", tmp_path / "plan.yaml"
    line = "plan --model llama3_8b --npus 4 --sequence-length 2048 --tp 4 --cp 1 --pp 1"
    words = [*line.split(), "--json", str(file), "--write", str(plan)]
    plan.write_text("num_layers: 2\n", "utf-8")
    assert cli.main(words) == 2
    assert f"--write {plan}: there is such a file, and not of a plan" in capsys.readouterr().err
    assert plan.read_text("utf-8") == "num_layers: 2\n"
    plan.unlink()
    for _ in range(2):  # a plan may overwrite a plan
        assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert f"Written: {plan}. On every node:\n\n    CONFIG={plan} bash scripts/launch_" in out
    assert "Recommended: TP 4, CP 1, PP 1, DP 1, overlap" in out
    assert ModelConfig.load(plan).tensor_model_parallel_size == 4
    content = json.loads(file.read_text())
    assert content["simulated"] is True
    assert content["recommended"] == content["forms"][0]
    assert content["recommended"]["layout"] == {"tp": 4, "cp": 1, "dp": 1, "pp": 1, "vpp": 1}
    assert content["recommended"]["flags"] == ["--commfuse-overlap"]


# ------------------------------------------------------------------- the flags that are printed

ALONE = training(LLAMA3_8B, Layout(8, 1, 1, 1))
FORMS = [form for form in forms(SERVER.machine(), ALONE) if form.launched]


@pytest.mark.parametrize(
    ("job", "form"),
    [
        *((ALONE, form) for form in FORMS),
        *(
            (training(LLAMA3_8B, layout, recomputes=True), OVERLAP)
            for layout in (Layout(4, 1, 1, 2), Layout(2, 1, 2, 2, vpp=2))
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else str(value.layout),
)
def test_what_is_printed_is_taken(job: Training, form: Variant) -> None:
    plan = planned(LLAMA3_8B, SERVER, job, form)
    launch = ask_about(None, [*LLAMA3_8B.arguments(), *options(LLAMA3_8B, plan)], {})
    launch.config.validate()
    assert launch.schedule.chunks > 0
    # Of a model with other sizes, all of them are printed.
    larger = replace(LLAMA3_8B, context_parallel_size=2, npus_per_node=16, seq_length=4096)
    assert {"--context-parallel-size", "--seq-length"} < {*options(larger, plan)}
    assert launch.fuse.use_commfuse == (
        form.name in ("fused layers", "fused layers, tuned", "overlap and fused layers")
    )
    against = obstacles(launch)
    assert not (against.fused if launch.fuse.use_commfuse else "")
    assert not (against.overlap if form == OVERLAP else "")
