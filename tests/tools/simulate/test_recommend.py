"""Recommended layouts and forms, and their flags, which the doctor and the launch accept."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Figure, Hardware
from commfuse_npu.options import DEFAULTS, add_arguments
from commfuse_npu.plan import Schedule
from commfuse_npu.refusals import check_compatible
from commfuse_npu.tools import cli
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.plan.obstacles import obstacles
from commfuse_npu.tools.simulate.footprint import footprint, limit
from commfuse_npu.tools.simulate.recommend import (
    Fixed,
    NoLayoutError,
    options,
    planned,
    recommend,
    write_plan,
)
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.timed import best, table
from commfuse_npu.tools.simulate.training import training
from commfuse_npu.tools.simulate.variants import MC2, forms, fused
from mindspeed_patches.training_options import check_options, linear_options
from tests.launchers.launching import dry_run

SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
LLAMA3_70B = ModelConfig.load(find_config("llama3_70b"))
SMALL = replace(LLAMA3_8B, seq_length=2048, global_batch_size=8)
"""Short sequences and a small batch, which take less time to simulate."""


def test_layouts_are_ranked_by_their_steps_and_the_launcher_takes_the_plan(tmp_path: Path) -> None:
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
        step = Step(SERVER.machine(), row.training)
        assert row.typical == step.time(row.form)
        assert len(row.seconds) == 5
        assert row.form.exact
        assert row.form.flags is not None
        # No other form of this layout is shorter.
        if row is rows[0]:
            assert row.typical == min(
                step.time(form)
                for form in forms(SERVER.machine(), row.training)
                if form.exact and form.flags is not None
            )
    assert any(not row.form.ours for row in rows), "the best without CommFuse is among them"
    assert re.match(r"\d layouts fit 57.6 GiB \(90% of an NPU\); not: \d x more memory", fitting)
    first, file = rows[0], tmp_path / "small.yaml"
    assert first.form.name == "commfuse-fb"
    write_plan(file, SMALL, SERVER, first.training, first.form, first.typical)
    assert ModelConfig.load(file) == planned(SMALL, SERVER, first.training, first.form)
    words = options(SMALL, first.training, first.form)
    ours = words[words.index("--commfuse-fb-overlap") :]
    assert " ".join(ours) in " ".join(dry_run("llama3_8b", CONFIG=str(file)))
    assert "--commfuse-fb-overlap" in ask_about(file, [], {}).options


def test_pipelines_are_interleaved_where_that_is_faster() -> None:
    model = replace(SMALL, num_layers=8, global_batch_size=4)
    rows, fitting = recommend(model, SERVER, 2, fixed=Fixed(tp=1, cp=1, pp=2))
    first = best(rows)
    assert fitting.startswith("1 layouts fit"), "layouts that differ in their chunks count once"
    assert first.training.layout == Layout(1, 1, 1, 2, vpp=4)
    words = options(model, first.training, first.form)
    assert words[words.index("--num-layers-per-virtual-pipeline-stage") + 1] == "1"
    assert "| 1 | 1 | 2 x 4 | 1 |" in table(rows)
    # Interleaving holds more activations than plain 1F1B.
    less = footprint(replace(first.training, vpp=1), first.form, SERVER)
    assert first.memory.activations > less.activations
    # Three micro-batches do not go through two stages two at a time.
    odd, _ = recommend(replace(model, global_batch_size=6), SERVER, 2, fixed=Fixed(1, 1, 2))
    assert best(odd).training.layout == Layout(1, 1, 1, 2)


@pytest.mark.parametrize(("gib", "chosen"), [(18.0, "none"), (14.0, "full")])
def test_memory_decides_on_recomputation(gib: float, chosen: str) -> None:
    model, size = replace(LLAMA3_8B, global_batch_size=2, num_layers=4), gib * 2.0**30
    figures = {**SERVER.figures, "npu.hbm_bytes": Figure(size, size, size, "assumed")}
    small, fixed = replace(SERVER, figures=figures), Fixed(tp=4, cp=1, pp=1)
    rows, _ = recommend(model, small, 4, fixed=fixed)
    first = best(rows)
    assert first.training.recompute == chosen
    words = options(model, first.training, first.form)
    assert ("--recompute-granularity" in words) is (chosen == "full")
    if chosen == "full":
        with pytest.raises(NoLayoutError, match="1 x more memory than an NPU has"):
            recommend(model, small, 4, fixed=fixed._replace(recompute="none"))


def test_what_is_given_decides() -> None:
    rows, _ = recommend(SMALL, SERVER, 8, fixed=Fixed(tp=2, cp=1, pp=1))
    assert {row.training.layout for row in rows} == {Layout(2, 1, 4, 1)}
    assert len(rows) == 2, "the best, and the best without CommFuse"


@pytest.mark.parametrize(
    ("model", "hardware", "npus", "fixed", "said"),
    [
        (LLAMA3_70B, SERVER, 1, {}, r"no layout of 1 NPUs fits 8192 tokens and .*memory"),
        (LLAMA3_8B, SERVER, 8200, {}, "choose from 1 to 8192"),
        (LLAMA3_8B, SERVER, 6, {"tp": 6}, "1 x 32 attention heads, 8 query groups and feed-"),
        (LLAMA3_8B, SERVER, 20, {}, "--npus 20 is more than a host of 8 .* choose 16 or 24"),
        (LLAMA3_8B, SERVER, 8, {"tp": 2, "pp": 3}, "8 is not divisible by --tp 2 times --pp 3 = 6"),
    ],
)
def test_nothing_fits(model, hardware, npus: int, fixed: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recommend(model, hardware, npus, fixed=Fixed(**fixed))


@pytest.mark.parametrize("layout", [Layout(8, 1, 2, 4), Layout(4, 1, 1, 8)])
def test_what_is_written_describes_what_was_simulated(layout: Layout) -> None:
    variant = fused(Schedule(lanes=2, chunks=4), tuned=(1, 2))
    job = training(LLAMA3_70B, layout)
    described = planned(LLAMA3_70B, SERVER, job, variant)
    sizes = ("tensor_model", "context", "data", "pipeline_model")
    assert tuple(getattr(described, f"{name}_parallel_size") for name in sizes) == layout[:4]
    assert described.world_size == layout.npus
    assert (described.num_layer_list or (80 // layout.pp,) * layout.pp) == job.layers
    batch = described.micro_batch_size * job.micro_batches * layout.dp
    assert described.global_batch_size == batch
    replicated = layout.dp * layout.cp > 1
    assert ("--overlap-grad-reduce" in described.pretrain_options) == replicated
    words = options(LLAMA3_70B, job, variant)
    assert described.commfuse_options == tuple(words[words.index("--use-commfuse") :])
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    full = planned(LLAMA3_70B, SERVER, replace(job, recompute="full"), variant)
    assert full.pretrain_options == (*described.pretrain_options, *more.split())
    # Flags of others are options of pretrain_gpt.py.
    other = planned(LLAMA3_70B, SERVER, job, MC2)
    assert other.pretrain_options == (*described.pretrain_options, "--use-ascend-mc2")
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
    assert "Recommended: TP 4, CP 1, PP 1, DP 1, commfuse-fb" in out
    assert ModelConfig.load(plan).tensor_model_parallel_size == 4
    content = json.loads(file.read_text())
    assert content["simulated"] is True
    assert content["recommended"] == content["forms"][0]
    assert content["recommended"]["layout"] == Layout(4, 1, 1, 1)._asdict()
    assert content["recommended"]["flags"] == ["--commfuse-fb-overlap"]


# ------------------------------------------------------------------- the flags that are printed

ALONE = Layout(8, 1, 1, 1)
FORMS = {
    form.name: form
    for form in forms(SERVER.machine(), training(LLAMA3_8B, ALONE))
    if form.flags is not None
}


def check(words: list[str]) -> argparse.Namespace:
    """Options of the model and ``words`` as parsed; plan and the launch accept them."""
    line = [*LLAMA3_8B.arguments(), *words]
    launch = ask_about(None, line, {})
    launch.config.validate()
    against = obstacles(launch)
    assert not (against.fused if launch.fuse.use_commfuse else "")
    assert not (against.overlap if "--commfuse-fb-overlap" in words else "")
    # As Megatron's parser returns them, defaults included.
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args, others = parser.parse_known_args(line)
    values = DEFAULTS | {name: value for name, value in vars(args).items() if value is not None}
    for word, value in pairwise([*others, "--"]):
        if word.startswith("--"):
            parsed = True if value.startswith("--") else value
            values[word[2:].replace("-", "_")] = int(value) if value.isdecimal() else parsed
    args = argparse.Namespace(**values)
    if launch.fuse.use_commfuse:
        check_options(args, complete=True)
    else:
        check_compatible(args, "--commfuse-fb-overlap")
    return args


@pytest.mark.parametrize("name", FORMS)
def test_what_is_printed_is_taken(name: str) -> None:
    form = FORMS[name]
    args = check(options(LLAMA3_8B, training(LLAMA3_8B, ALONE), form))
    assert args.use_commfuse == (form.kind == "fused")
    if form.kind == "fused":
        assert linear_options(args).wgrad == ("blocks" if form.rounded else "whole")


def test_a_layout_and_recomputation_are_taken() -> None:
    for layout in (Layout(4, 1, 1, 2), Layout(2, 1, 2, 2, vpp=2)):
        job = training(LLAMA3_8B, layout, recompute="full")
        check(options(LLAMA3_8B, job, FORMS["commfuse-fb"]))
