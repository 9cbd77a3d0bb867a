"""Layouts and schedules that are recommended, and how."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Figure, Hardware
from commfuse_npu.hardware.machine import Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools import cli
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.simulate.footprint import footprint, limit
from commfuse_npu.tools.simulate.launch_options import (
    check_target,
    options,
    planned,
    write_plan,
)
from commfuse_npu.tools.simulate.recommend import (
    Candidate,
    Fixed,
    NoLayoutError,
    Recommendation,
    recommend,
)
from commfuse_npu.tools.simulate.recommendation_report import as_json, reasons, report
from commfuse_npu.tools.simulate.step import Layout, Step, StepTime, Training
from commfuse_npu.tools.simulate.sweep import Options, training
from commfuse_npu.tools.simulate.variants import Variant, fused
from tests.launchers.launching import dry_run

ROOT = Path(__file__).resolve().parents[3]
SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
CLUSTER = Hardware.load(find_config("ascend_910b_roce", "hardware"))
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
LLAMA3_70B = ModelConfig.load(find_config("llama3_70b"))
SMALL = replace(LLAMA3_8B, seq_length=2048, global_batch_size=8)
"""What takes less time to simulate."""
PLAN = [
    *("plan", "--model", "llama3_8b", "--npus", "4", "--sequence-length", "2048"),
    *("--tp", "4", "--cp", "1", "--pp", "1"),
]


def check_ranked(found: Recommendation, npus: int, hardware: Hardware) -> None:
    steps = [one.seconds for one in found.ranked]
    assert steps == sorted(steps)
    assert len({one.training.layout for one in found.ranked}) == len(found.ranked) > 1
    for one in found.ranked:
        assert one.training.layout.npus == npus
        assert one.memory.total <= limit(hardware)
        # What is said is what the simulator says.
        step = Step(hardware.machine(), one.training).time(one.variant)
        assert one.seconds == step.seconds
    assert found.best is found.ranked[0] is found.schedules[0]
    assert found.runner_up is found.ranked[1]
    assert found.other is found.rivals[0]
    kinds = [one.variant.kind for one in found.rivals]
    assert len(kinds) == len(set(kinds))
    assert not {"fused", "ideal"} & set(kinds), "what can be launched without CommFuse"
    assert found.bound is not None
    assert found.bound.variant.kind == "ideal"
    assert found.steps[found.best][0] == found.best.seconds
    assert found.refused["more memory than an NPU has"] > 0


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(SMALL, SERVER, 4, fixed=Fixed(cp=1, pp=1))


def test_layouts_are_ranked_by_their_steps(found: Recommendation) -> None:
    check_ranked(found, 4, SERVER)
    assert found.best.training.recompute == "none"
    assert len({one.variant for one in found.schedules}) == len(found.schedules) == 3
    # One rank stands for all in the search; what is said is of all of them.
    assert found.fitting >= len(found.ranked)


class TimedStep:
    """Steps whose seconds are given, by tensor parallelism and by who it is."""

    seconds: ClassVar[dict[tuple[int, bool], float]]

    def __init__(self, machine: Machine, training: Training, **_: object) -> None:
        self.tp = training.layout.tp

    def time(self, variant: Variant) -> StepTime:
        layer = 0.5 if variant.kind == "compute" else 0.5 + self.tp
        return StepTime(self.seconds[self.tp, variant.ours], layer, 0.0)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        # The next best layout has nothing to fuse, and is the rival, too.
        ({(1, False): 2, (2, True): 1, (2, False): 5, (4, True): 4, (4, False): 5}, (2, True)),
        # A rival in a layout in which ours is not the first is the best.
        ({(1, False): 8, (2, True): 2, (2, False): 5, (4, True): 4, (4, False): 1}, (4, False)),
        ({(1, False): 1, (2, True): 2, (2, False): 5, (4, True): 4, (4, False): 5}, (1, False)),
    ],
)
def test_the_best_is_compared_with_whatever_is_named_beside_it(
    seconds: dict[tuple[int, bool], float], best: tuple[int, bool], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TimedStep, "seconds", seconds, raising=False)
    monkeypatch.setattr("commfuse_npu.tools.simulate.recommend.Step", TimedStep)
    model = replace(SMALL, num_layers=8)
    found = recommend(model, SERVER, 4, fixed=Fixed(cp=1, pp=1))
    assert (found.best.training.layout.tp, found.best.variant.ours) == best
    assert found.best.seconds == min(seconds.values())
    assert set(found.steps) == {found.best, found.other, found.runner_up, found.fused} - {None}
    assert found.runner_up not in (None, found.best, found.other)
    assert found.ratio.typical == pytest.approx(2 * best[0]), "of the layout that is recommended"
    text = "\n".join([*reasons(found), report(found, model, Path("small.yaml"), SERVER)])
    assert f"Recommended: TP {best[0]}, CP 1, PP 1, DP {4 // best[0]}, " in text
    for title, one in {"Runner-up": found.runner_up, "Without CommFuse": found.other}.items():
        if one is not None and one != found.best:
            longer = one.seconds / found.best.seconds - 1
            said = rf"- {title}: TP \d, .*, {longer:.1%} longer \({found.beats(one)} of 5 machines"
            assert re.search(said, text)
    first = f"Schedules of the first layout: {found.schedules[0].variant.name}, then"
    assert (first in text) == (len(found.schedules) > 1)
    assert text.count("**") == 2, "one row is bold"
    # What is recommended is what can be launched, and what is written.
    content = as_json(found, model)
    launched = options(model, found.best)
    assert content["recommended"]["options"] == launched
    for one in (*content["layouts"], *content["without_commfuse"]):
        assert one["options"][:2] == ["--tensor-model-parallel-size", str(one["layout"]["tp"])]
    write_plan(tmp_path / "plan.yaml", model, SERVER, found.best)
    assert ModelConfig.load(tmp_path / "plan.yaml").tensor_model_parallel_size == best[0]


def test_what_was_given_stays() -> None:
    given = recommend(SMALL, SERVER, 8, fixed=Fixed(tp=2, cp=1, pp=1))
    assert [one.training.layout for one in given.ranked] == [Layout(2, 1, 4, 1)]
    # With one layout the runner-up is another schedule.
    assert given.runner_up is given.schedules[1]
    assert given.runner_up.training == given.best.training


def test_pipelines_are_interleaved_where_that_is_faster() -> None:
    model = replace(SMALL, num_layers=8, global_batch_size=4)
    found = recommend(model, SERVER, 2, fixed=Fixed(tp=1, cp=1, pp=2))
    assert found.fitting == 1, "layouts that differ in their chunks count once"
    assert found.best.training.layout == Layout(1, 1, 1, 2, vpp=4)
    words = options(model, found.best)
    assert words[words.index("--num-layers-per-virtual-pipeline-stage") + 1] == "1"
    assert "| 1 | 1 | 1 | 2 x 4 | 1 |" in report(found, model, Path("mine.yaml"), SERVER)
    # More than the chunks of plain 1F1B are held.
    less = footprint(replace(found.best.training, vpp=1), found.best.variant, SERVER)
    assert found.best.memory.activations > less.activations
    # Three micro-batches do not go through two stages two at a time.
    odd = recommend(replace(model, global_batch_size=6), SERVER, 2, fixed=Fixed(1, 1, 2))
    assert odd.best.training.layout == Layout(1, 1, 1, 2)


def test_memory_decides_on_recomputation() -> None:
    model = replace(LLAMA3_8B, global_batch_size=2, num_layers=4)

    def fitting(gib: float, **fixed: object) -> str:
        size = gib * 2.0**30
        figures = {**SERVER.figures, "npu.hbm_bytes": Figure(size, size, size, "assumed")}
        chosen = Fixed(tp=4, cp=1, pp=1, **fixed)
        found = recommend(model, replace(SERVER, figures=figures), 4, fixed=chosen)
        again = "--recompute-granularity" in options(model, found.best)
        assert again == found.best.training.again
        return found.best.training.recompute

    assert fitting(16.6) == "none"
    assert fitting(15.0) == "full"
    with pytest.raises(NoLayoutError, match="1 x more memory than an NPU has"):
        fitting(15.0, recompute="none")


def test_groups_that_do_not_lie_evenly_on_nodes_are_left_out() -> None:
    odd = replace(SMALL, global_batch_size=48, num_layers=8)
    found = recommend(odd, CLUSTER, 24, fixed=Fixed(tp=1, cp=1))
    assert any("does not fill whole nodes of 8 NPUs" in why for why in found.refused)
    assert found.ranked


def test_ulysses_is_fused_where_there_is_no_tensor_parallelism() -> None:
    model = replace(SMALL, context_parallel_algo="ulysses_cp_algo", num_layers=8)
    given = Options(ulysses="fused")
    fast = CLUSTER.launching(1e-5)
    found = recommend(model, fast, 8, options=given, fixed=Fixed(tp=1, cp=4, pp=1))
    words = options(model, found.best)
    assert "--commfuse-ulysses" in words
    assert words[words.index("--commfuse-lanes") + 1] == "3"


def test_other_rounding_is_chosen_only_if_allowed() -> None:
    same, other = (
        recommend(SMALL, SERVER, 8, fixed=Fixed(tp=2, cp=1, pp=1), other_rounding=allowed)
        for allowed in (False, True)
    )
    assert {one.variant.wgrad for one in same.schedules} == {"whole"}
    assert {one.variant.wgrad for one in other.schedules} == {"whole", "blocks"}
    assert other.best.seconds <= same.best.seconds


def test_nothing_fits() -> None:
    with pytest.raises(NoLayoutError, match=r"no layout of 1 NPUs fits 8192 tokens and .*memory"):
        recommend(LLAMA3_70B, CLUSTER, 1)
    with pytest.raises(ValueError, match="choose from 1 to 8"):
        recommend(LLAMA3_8B, SERVER, 9)
    with pytest.raises(
        NoLayoutError, match="1 x 32 attention heads, 8 query groups, a feed-forward width"
    ):
        recommend(LLAMA3_8B, SERVER, 6, fixed=Fixed(tp=6))
    with pytest.raises(ValueError, match=r"--npus 20 is more than a host of 8 .* choose 16 or 24"):
        recommend(LLAMA3_8B, CLUSTER, 20)
    with pytest.raises(ValueError, match="--npus 8 is not divisible by --tp 2 times --pp 3 = 6"):
        recommend(LLAMA3_8B, SERVER, 8, fixed=Fixed(tp=2, pp=3))


def candidate(layout: Layout, variant: Variant | None = None) -> Candidate:
    """A layout of Llama 3 70B, as if it had been found."""
    chosen = variant or fused(Schedule(lanes=2, chunks=4))
    what = training(LLAMA3_70B, layout, LLAMA3_70B.seq_length, Options())
    return Candidate(what, chosen, 1.0, footprint(what, chosen, CLUSTER))


@pytest.mark.parametrize("layout", [Layout(8, 1, 2, 4), Layout(4, 1, 1, 8), Layout(4, 2, 1, 8)])
def test_what_is_written_describes_what_was_simulated(layout: Layout) -> None:
    one = candidate(layout)
    described = planned(LLAMA3_70B, CLUSTER, one)
    sizes = ("tensor_model", "context", "data", "pipeline_model")
    assert tuple(getattr(described, f"{name}_parallel_size") for name in sizes) == layout[:4]
    assert described.world_size == layout.npus
    assert (described.num_layer_list or (80 // layout.pp,) * layout.pp) == one.training.layers
    batch = described.micro_batch_size * one.training.micro_batches * layout.dp
    assert described.global_batch_size == batch
    replicated = layout.dp * layout.cp > 1
    assert ("--overlap-grad-reduce" in described.pretrain_options) == replicated
    words = options(LLAMA3_70B, one)
    assert described.commfuse_options == tuple(words[words.index("--use-commfuse") :])
    again = planned(LLAMA3_70B, CLUSTER, replace(one, variant=Variant("megatron", "megatron")))
    assert again == replace(described, commfuse_options=())
    full = planned(
        LLAMA3_70B, CLUSTER, replace(one, training=replace(one.training, recompute="full"))
    )
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert full.pretrain_options == (*described.pretrain_options, *words.split())


def test_what_no_plan_decides_about_is_kept() -> None:
    model = ModelConfig.load(find_config("llama2_70b"))
    assert "--num-layers-per-virtual-pipeline-stage" in model.pretrain_options
    written = planned(model, CLUSTER, candidate(Layout(8, 1, 4, 1))).pretrain_options
    assert written == ("--adam-eps", "1e-5", "--overlap-grad-reduce", "--overlap-param-gather")


def test_the_launcher_takes_what_is_written(found: Recommendation, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    for attempt in range(2):  # a plan may take the place of a plan
        check_target(file)
        write_plan(file, SMALL, SERVER, found.best)
        assert ModelConfig.load(file) == planned(SMALL, SERVER, found.best), attempt
    words = dry_run("llama3_8b", CONFIG=str(file))
    given = options(SMALL, found.best)
    at = given.index("--commfuse-fb-overlap")
    assert " ".join(given[at:]) in " ".join(words)
    for option, value in pairwise(given[:at]):
        left_out = option == "--context-parallel-size" and value == "1"
        if option.startswith("--") and not value.startswith("--") and not left_out:
            assert words[words.index(option) + 1] == value, option
    assert "--commfuse-fb-overlap" in ask_about(file, [], {}).options


def test_nothing_but_a_plan_is_written_over(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("num_layers: 2\n", "utf-8")
    assert cli.main(["plan", "--model", "llama3_8b", "--write", str(file)]) == 2
    assert f"--write {file}: there is such a file, and not of a plan" in capsys.readouterr().err
    assert file.read_text("utf-8") == "num_layers: 2\n"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    plan = tmp_path / "plan.yaml"
    assert cli.main([*PLAN, "--json", str(file), "--write", str(plan)]) == 0
    out = capsys.readouterr().out
    launch = f"Written: {plan}. On every node:\n\n    CONFIG={plan} bash scripts/launch_"
    assert launch in out
    assert out.endswith(f"\nWritten: {file}: all figures\n")
    assert ModelConfig.load(plan).tensor_model_parallel_size == 4
    assert "Recommended: TP 4, CP 1, PP 1, DP 1, commfuse-fb" in out
    assert out.count("--commfuse-fb-overlap") == 1
    content = json.loads(file.read_text())
    assert content["simulated"] is True
    assert content["layouts"][0]["layout"] == Layout(4, 1, 1, 1)._asdict()
    assert len(content["layouts"][0]["step_seconds_on_all_machines"]) == 5


@pytest.mark.parametrize(
    ("writer", "option"), [("write_plan", "--write"), ("write_json", "--json")]
)
def test_a_file_that_fails_keeps_none_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    writer: str, option: str,
) -> None:  # fmt: skip
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"commfuse_npu.tools.plan.command.{writer}", full)
    files = {"--write": tmp_path / "plan.yaml", "--json": tmp_path / "plan.json"}
    assert cli.main([*PLAN, *(str(word) for item in files.items() for word in item)]) == 2
    captured = capsys.readouterr()
    assert f"error: {option} {files[option]} was not written: No space left" in captured.err
    for one, file in files.items():
        assert file.exists() == (one != option)
        assert (f"Written: {file}" in captured.out) == (one != option)


def test_a_question_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "llama3_70b", "--npus", "2"]) == 1
    assert "take another --npus" in capsys.readouterr().err
