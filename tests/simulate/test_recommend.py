"""Layouts and schedules that are recommended, and how."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu import cli
from commfuse_npu.model_config import ModelConfig
from commfuse_npu.simulate.footprint import limit
from commfuse_npu.simulate.hardware import Hardware, find_config
from commfuse_npu.simulate.recommend import Fixed, NoLayoutError, Recommendation, recommend
from commfuse_npu.simulate.recommendation_report import launch, options, report
from commfuse_npu.simulate.step import Step
from mindspeed_patches.arguments import DEFAULTS, commfuse_options

ROOT = Path(__file__).resolve().parents[2]
SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
CLUSTER = Hardware.load(find_config("ascend_910b_roce", "hardware"))
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
LLAMA3_70B = ModelConfig.load(find_config("llama3_70b"))


@pytest.fixture(scope="module")
def found() -> Recommendation:
    return recommend(LLAMA3_70B, CLUSTER, 64)


def test_layouts_are_ranked_by_their_steps(found: Recommendation) -> None:
    steps = [one.seconds for one in found.ranked]
    assert steps == sorted(steps)
    assert len({one.layout for one in found.ranked}) == len(found.ranked) > 3
    for one in found.ranked:
        assert one.layout.npus == 64
        assert one.memory.total <= limit(CLUSTER)
        # What is said is what the simulator says.
        step = Step(CLUSTER.machine(), one.training).time(one.variant)
        assert one.seconds == step.seconds
    assert found.best is found.ranked[0] is found.schedules[0]
    assert found.runner_up is found.ranked[1]
    assert found.other.variant.schedule is None
    assert found.steps[found.best][0] == found.best.seconds
    assert found.refused["more memory than an NPU has"] > 0


def test_what_was_given_stays() -> None:
    given = recommend(LLAMA3_70B, CLUSTER, 64, fixed=Fixed(tp=8, cp=1, pp=4))
    assert [one.layout for one in given.ranked] == [(8, 1, 2, 4)]
    # With one layout the runner-up is another schedule.
    assert given.runner_up is given.schedules[1]
    assert given.runner_up.layout == given.best.layout


def test_recomputation_comes_only_where_memory_is_short() -> None:
    roomy = recommend(LLAMA3_8B, SERVER, 8, fixed=Fixed(tp=8, cp=1, pp=1))
    assert roomy.best.recompute == "none"
    tight = recommend(LLAMA3_8B, SERVER, 8, sequence=65536, fixed=Fixed(tp=8, cp=1, pp=1))
    assert tight.best.recompute == "full"
    assert "--recompute-granularity full" in " ".join(options(LLAMA3_8B, tight.best))
    with pytest.raises(NoLayoutError, match="1 x more memory than an NPU has"):
        recommend(LLAMA3_8B, SERVER, 8, sequence=65536, fixed=Fixed(8, 1, 1, "none"))


def test_other_rounding_is_chosen_only_if_allowed() -> None:
    fixed = Fixed(tp=2, cp=1, pp=1, recompute="full")
    same, other = (
        recommend(LLAMA3_8B, SERVER, 8, fixed=fixed, other_rounding=allowed)
        for allowed in (False, True)
    )
    assert {one.variant.wgrad for one in same.schedules} == {"whole"}
    assert {one.variant.wgrad for one in other.schedules} == {"whole", "blocks"}
    assert other.best.seconds <= same.best.seconds


def test_nothing_fits() -> None:
    with pytest.raises(NoLayoutError, match=r"no layout of 1 NPUs fits 8192 tokens: .*memory"):
        recommend(LLAMA3_70B, CLUSTER, 1)
    with pytest.raises(ValueError, match="choose from 1 to 8"):
        recommend(LLAMA3_8B, SERVER, 9)
    with pytest.raises(NoLayoutError, match="1 x feed-forward width is not divisible by TP"):
        recommend(LLAMA3_8B, SERVER, 6, fixed=Fixed(tp=6))


def test_the_options_are_those_of_the_feature(found: Recommendation) -> None:
    assert found.fused is not None
    words = iter(options(LLAMA3_70B, found.fused))
    given = dict(DEFAULTS)
    size = "tensor_model_parallel_size"
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if name in given:
            given[name] = True if isinstance(given[name], bool) else next(words)
        elif name == size:
            given[size] = next(words)
    assert given["use_commfuse"]
    read = commfuse_options(type("Given", (), given)())  # type: ignore[arg-type]
    schedule = found.fused.variant.schedule
    assert schedule is not None
    assert read.linear.schedule.lanes == schedule.lanes
    assert read.linear.schedule.chunks == schedule.chunks
    assert read.linear.schedule.taper == schedule.taper
    assert read.attention == found.fused.variant.attention


@pytest.mark.parametrize("place", [0, -1])
def test_the_launcher_takes_the_command(found: Recommendation, place: int) -> None:
    command = launch(LLAMA3_70B, find_config("llama3_70b"), CLUSTER, found.ranked[place])
    assert command is not None
    env = {**os.environ, "DRY_RUN": "1", "MASTER_ADDR": "node0", "NODE_RANK": "0"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout)
    layout = found.ranked[place].layout
    for option, value in (
        ("--tensor-model-parallel-size", layout.tp),
        ("--pipeline-model-parallel-size", layout.pp),
        ("--nnodes", 8),
    ):
        assert printed[printed.index(option) + 1] == str(value)
    assert ("--use-commfuse" in printed) == (found.ranked[place].variant.schedule is not None)


def test_a_model_without_a_launcher_gets_options_only(
    found: Recommendation, tmp_path: Path
) -> None:
    assert launch(LLAMA3_70B, tmp_path / "mine.yaml", CLUSTER, found.best) is None


def test_the_report_says_where_something_else_is_ahead(found: Recommendation) -> None:
    path = find_config("llama3_70b")
    text = report(found, LLAMA3_70B, path, CLUSTER)
    ahead = found.other.seconds < found.best.seconds
    assert ("CommFuse is not ahead here" in text) == ahead
    slower = replace(found.other, seconds=2 * found.best.seconds)
    behind = replace(found, other=slower, steps={**found.steps, slower: found.steps[found.other]})
    assert "CommFuse is not ahead here" not in report(behind, LLAMA3_70B, path, CLUSTER)
    assert f"{2 - 1:.1%} longer" in report(behind, LLAMA3_70B, path, CLUSTER)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = ["plan", "--model", "llama3_8b", "--tp", "8", "--pp", "1", "--json", str(file)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "Recommended: TP 8, CP 1, PP 1, DP 1, commfuse-" in out
    assert "--use-commfuse" in out
    content = json.loads(file.read_text())
    assert content["simulated"] is True
    assert content["layouts"][0]["layout"] == {"tp": 8, "cp": 1, "dp": 1, "pp": 1}
    assert len(content["layouts"][0]["step_seconds_on_all_machines"]) == 5


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan"], 2, "give a kind to draw, or --model"),
        (["plan", "gather", "--model", "llama3_8b"], 2, "give a kind to draw, or --model"),
        (["plan", "--model", "nothing"], 2, "nothing is neither a file nor one of"),
        (["plan", "--model", "llama3_8b", "--npus", "9"], 2, "choose from 1 to 8"),
        (["plan", "--model", "llama3_8b", "--npus", "0"], 2, "choose from 1 to 8"),
        (["plan", "--model", "llama3_70b", "--npus", "2"], 1, "take more NPUs"),
    ],
)
def test_questions_that_have_no_answer(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    assert said in capsys.readouterr().err


def test_a_tapered_plan_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "gather", "--ranks", "2", "--chunks", "4", "--taper", "2"]) == 0
    assert "4 chunks, tapered by 2" in capsys.readouterr().out
