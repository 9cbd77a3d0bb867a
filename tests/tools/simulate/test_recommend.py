"""Recommended layouts and schedules, and their flags, which the doctor and the launch accept."""

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
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.simulate.footprint import footprint, limit
from commfuse_npu.tools.simulate.launch_options import options, planned, write_plan
from commfuse_npu.tools.simulate.recommend import Candidate, Fixed, NoLayoutError, recommend
from commfuse_npu.tools.simulate.recommendation_report import reasons, report
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, of_hardware, training
from commfuse_npu.tools.simulate.variants import Variant, fused
from mindspeed_patches.training_options import check_options, linear_options
from tests.launchers.launching import dry_run

SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
CLUSTER = Hardware.load(find_config("ascend_910b_roce", "hardware"))
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
LLAMA3_70B = ModelConfig.load(find_config("llama3_70b"))
SMALL = replace(LLAMA3_8B, seq_length=2048, global_batch_size=8)
"""Short sequences and a small batch, which take less time to simulate."""


def test_layouts_are_ranked_by_their_steps_and_the_launcher_takes_the_plan(tmp_path: Path) -> None:
    result = recommend(SMALL, SERVER, 4, fixed=Fixed(cp=1, pp=1))
    steps = [entry.seconds for entry in result.ranked]
    assert steps == sorted(steps)
    assert len({entry.training.layout for entry in result.ranked}) == len(steps) > 1
    for entry in result.ranked:
        assert entry.training.layout.npus == 4
        assert entry.memory.total <= limit(SERVER)
        # The reported time is the simulated one.
        assert entry.seconds == Step(SERVER.machine(), entry.training).time(entry.variant).seconds
    assert result.best is result.ranked[0] is result.schedules[0]
    assert len({entry.variant for entry in result.schedules}) == len(result.schedules) == 3
    kinds = [entry.variant.kind for entry in result.rivals]
    assert len(kinds) == len(set(kinds))
    assert not {"fused", "ideal"} & set(kinds), "what can be launched without CommFuse"
    assert result.bound.variant.kind == "ideal"
    assert result.refused["more memory than an NPU has"] > 0
    # A rival that is faster is recommended.
    faster = replace(result.other, seconds=result.best.seconds / 2)
    assert replace(result, rivals=(faster, *result.rivals[1:])).best is faster
    assert replace(result, rivals=(result.runner_up,)).runner_up not in (None, result.runner_up)
    # The alternatives that are named, and how they compare.
    assert set(result.steps) == {result.best, result.other, result.runner_up, result.fused} - {None}
    text = "\n".join([*reasons(result), report(result, SMALL, Path("small.yaml"), SERVER)])
    assert text.count("**") == 2, "one row is bold"
    for title, entry in {"Runner-up": result.runner_up, "Without CommFuse": result.other}.items():
        assert entry not in (None, result.best)
        longer = entry.seconds / result.best.seconds - 1
        line = rf"- {title}: TP \d, .*, {longer:.1%} longer \({result.beats(entry)} of 5 simulated"
        assert re.search(line, text)
    file = tmp_path / "small.yaml"
    write_plan(file, SMALL, SERVER, result.best)
    assert ModelConfig.load(file) == planned(SMALL, SERVER, result.best)
    words = options(SMALL, result.best)
    ours = words[words.index("--commfuse-fb-overlap") :]
    assert " ".join(ours) in " ".join(dry_run("llama3_8b", CONFIG=str(file)))
    assert "--commfuse-fb-overlap" in ask_about(file, [], {}).options


def test_pipelines_are_interleaved_where_that_is_faster() -> None:
    model = replace(SMALL, num_layers=8, global_batch_size=4)
    result = recommend(model, SERVER, 2, fixed=Fixed(tp=1, cp=1, pp=2))
    assert result.fitting == 1, "layouts that differ in their chunks count once"
    assert result.best.training.layout == Layout(1, 1, 1, 2, vpp=4)
    words = options(model, result.best)
    assert words[words.index("--num-layers-per-virtual-pipeline-stage") + 1] == "1"
    assert "| 1 | 1 | 1 | 2 x 4 | 1 |" in report(result, model, Path("mine.yaml"), SERVER)
    # Interleaving holds more activations than plain 1F1B.
    less = footprint(replace(result.best.training, vpp=1), result.best.variant, SERVER)
    assert result.best.memory.activations > less.activations
    # Three micro-batches do not go through two stages two at a time.
    odd = recommend(replace(model, global_batch_size=6), SERVER, 2, fixed=Fixed(1, 1, 2))
    assert odd.best.training.layout == Layout(1, 1, 1, 2)


@pytest.mark.parametrize(("gib", "chosen"), [(16.6, "none"), (15.0, "full")])
def test_memory_decides_on_recomputation(gib: float, chosen: str) -> None:
    model, size = replace(LLAMA3_8B, global_batch_size=2, num_layers=4), gib * 2.0**30
    figures = {**SERVER.figures, "npu.hbm_bytes": Figure(size, size, size, "assumed")}
    small, fixed = replace(SERVER, figures=figures), Fixed(tp=4, cp=1, pp=1)
    best = recommend(model, small, 4, fixed=fixed).best
    assert best.training.recompute == chosen
    assert ("--recompute-granularity" in options(model, best)) is (chosen == "full")
    if chosen == "full":
        with pytest.raises(NoLayoutError, match="1 x more memory than an NPU has"):
            recommend(model, small, 4, fixed=fixed._replace(recompute="none"))


def test_what_is_given_decides() -> None:
    fixed = Fixed(tp=2, cp=1, pp=1)
    same = recommend(SMALL, SERVER, 8, fixed=fixed)
    other = recommend(SMALL, SERVER, 8, fixed=fixed, other_rounding=True)
    assert [entry.training.layout for entry in same.ranked] == [Layout(2, 1, 4, 1)]
    # With one layout the runner-up is another schedule.
    assert same.runner_up is same.schedules[1]
    assert {entry.variant.wgrad for entry in same.schedules} == {"whole"}
    assert {entry.variant.wgrad for entry in other.schedules} == {"whole", "blocks"}
    # Ulysses is fused where there is no tensor parallelism.
    model = replace(SMALL, context_parallel_algo="ulysses_cp_algo", num_layers=8)
    fixed, settings = Fixed(tp=1, cp=4, pp=1), Options(ulysses="fused")
    ulysses = recommend(model, CLUSTER.launching(1e-5), 8, options=settings, fixed=fixed)
    words = options(model, ulysses.best)
    assert "--commfuse-ulysses" in words
    assert words[words.index("--commfuse-lanes") + 1] == "3"


@pytest.mark.parametrize(
    ("model", "hardware", "npus", "fixed", "said"),
    [
        (LLAMA3_70B, CLUSTER, 1, {}, r"no layout of 1 NPUs fits 8192 tokens and .*memory"),
        (LLAMA3_8B, SERVER, 9, {}, "choose from 1 to 8"),
        (LLAMA3_8B, SERVER, 6, {"tp": 6}, "1 x 32 attention heads, 8 query groups, a feed-forw"),
        (LLAMA3_8B, CLUSTER, 20, {}, "--npus 20 is more than a host of 8 .* choose 16 or 24"),
        (LLAMA3_8B, SERVER, 8, {"tp": 2, "pp": 3}, "8 is not divisible by --tp 2 times --pp 3 = 6"),
    ],
)
def test_nothing_fits(model, hardware, npus: int, fixed: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recommend(model, hardware, npus, fixed=Fixed(**fixed))


@pytest.mark.parametrize("layout", [Layout(8, 1, 2, 4), Layout(4, 1, 1, 8)])
def test_what_is_written_describes_what_was_simulated(layout: Layout) -> None:
    variant = fused(Schedule(lanes=2, chunks=4))
    job = training(LLAMA3_70B, layout, LLAMA3_70B.seq_length, Options())
    entry = Candidate(job, variant, 1.0, footprint(job, variant, CLUSTER))
    described = planned(LLAMA3_70B, CLUSTER, entry)
    sizes = ("tensor_model", "context", "data", "pipeline_model")
    assert tuple(getattr(described, f"{name}_parallel_size") for name in sizes) == layout[:4]
    assert described.world_size == layout.npus
    assert (described.num_layer_list or (80 // layout.pp,) * layout.pp) == job.layers
    batch = described.micro_batch_size * job.micro_batches * layout.dp
    assert described.global_batch_size == batch
    replicated = layout.dp * layout.cp > 1
    assert ("--overlap-grad-reduce" in described.pretrain_options) == replicated
    words = options(LLAMA3_70B, entry)
    assert described.commfuse_options == tuple(words[words.index("--use-commfuse") :])
    full = replace(entry, training=replace(job, recompute="full"))
    more = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    written = planned(LLAMA3_70B, CLUSTER, full).pretrain_options
    assert written == (*described.pretrain_options, *more.split())


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
    assert content["layouts"][0]["layout"] == Layout(4, 1, 1, 1)._asdict()
    assert len(content["layouts"][0]["step_seconds_on_all_machines"]) == 5


# ------------------------------------------------------------------- the flags that are printed

ALONE = Layout(8, 1, 1, 1)


def candidate(variant: Variant, layout: Layout, **changes: object) -> Candidate:
    job = replace(training(LLAMA3_8B, layout, LLAMA3_8B.seq_length, Options()), **changes)
    return Candidate(job, variant, 1.0, footprint(job, variant, SERVER))


FORMS = {
    variant.name: variant
    for variant in of_hardware(SERVER, ALONE, Options())
    if variant.role not in ("plain", "bound")
}


def check(words: list[str]) -> argparse.Namespace:
    """Options of the model and ``words`` as parsed; the doctor and the launch accept them."""
    line = [*LLAMA3_8B.arguments(), *words]
    launch = ask_about(None, line, {})
    assert not [str(finding) for finding in check_launch(launch) if finding.level == "error"]
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
    args = check(options(LLAMA3_8B, candidate(form, ALONE)))
    assert args.use_commfuse == (form.kind == "fused")
    if form.schedule is not None:
        read = linear_options(args)
        assert (args.commfuse_attention, read.wgrad) == (form.attention, form.wgrad)
        for part in () if form.tuned else ("lanes", "chunks", "taper"):
            assert getattr(read.schedule, part) == getattr(form.schedule, part)


def test_a_layout_and_recomputation_are_taken() -> None:
    for layout in (Layout(4, 1, 1, 2), Layout(2, 1, 2, 2, vpp=2)):
        check(options(LLAMA3_8B, candidate(FORMS["commfuse-fb"], layout, recompute="full")))
