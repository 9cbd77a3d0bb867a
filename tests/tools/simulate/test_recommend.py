"""Layouts and schedules that are recommended, and how."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import limit
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.recommend import Fixed, NoLayoutError, Recommendation, recommend
from commfuse_npu.tools.simulate.recommendation_report import launch, options, report
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.sweep import Options
from mindspeed_patches.arguments import DEFAULTS, commfuse_options
from mindspeed_patches.refusals import ATTENTION_REFUSALS, REFUSALS, check_compatible

ROOT = Path(__file__).resolve().parents[3]
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
    assert " x more memory than an NPU has" in str(found.refused)


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


def test_fewer_lanes_are_taken_where_memory_is_short() -> None:
    # All seven would need more than there is; two fit without recomputation.
    tight = recommend(LLAMA3_70B, CLUSTER, 32, fixed=Fixed(tp=8, cp=1, pp=4))
    lanes = {one.variant.schedule.lanes for one in tight.schedules if one.variant.schedule}
    assert lanes == {1, 2}
    assert tight.best.recompute == "none"
    # Recomputation makes room for all of them.
    fixed = Fixed(tp=8, cp=1, pp=4, recompute="full")
    roomy = recommend(LLAMA3_70B, CLUSTER, 32, fixed=fixed)
    lanes = {one.variant.schedule.lanes for one in roomy.schedules if one.variant.schedule}
    assert lanes == {1, 2, 7}


def test_groups_that_do_not_lie_evenly_on_nodes_are_left_out() -> None:
    odd = replace(LLAMA3_8B, global_batch_size=480)
    found = recommend(odd, CLUSTER, 24)
    assert "does not fill whole nodes of 8 NPUs" in str(found.refused)
    assert found.ranked


def test_ulysses_is_fused_where_there_is_no_tensor_parallelism() -> None:
    model = replace(LLAMA3_8B, context_parallel_algo="ulysses_cp_algo")
    given = Options(ulysses="fused")
    found = recommend(model, CLUSTER, 16, options=given, fixed=Fixed(tp=1, cp=4))
    words = options(model, found.best)
    assert "--commfuse-ulysses" in words
    assert words[words.index("--commfuse-lanes") + 1] == "3"


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
    with pytest.raises(NoLayoutError, match=r"no layout of 1 NPUs fits 8192 tokens and .*memory"):
        recommend(LLAMA3_70B, CLUSTER, 1)
    with pytest.raises(ValueError, match="choose from 1 to 8"):
        recommend(LLAMA3_8B, SERVER, 9)
    with pytest.raises(NoLayoutError, match="1 x feed-forward width 14336 is not divisible by TP"):
        recommend(LLAMA3_8B, SERVER, 6, fixed=Fixed(tp=6))
    with pytest.raises(ValueError, match=r"--npus 20 is more than a host of 8 .* choose 16 or 24"):
        recommend(LLAMA3_8B, CLUSTER, 20)
    with pytest.raises(ValueError, match="--npus 8 is not divisible by --tp 2 times --pp 3 = 6"):
        recommend(LLAMA3_8B, SERVER, 8, fixed=Fixed(tp=2, pp=3))


def test_the_options_are_those_of_the_feature() -> None:
    fixed = Fixed(tp=8, cp=1, pp=4)
    found = recommend(LLAMA3_70B, CLUSTER, 64, fixed=fixed, other_rounding=True)
    wgrads = set()
    for one in found.schedules:
        given = _given(options(LLAMA3_70B, one))
        assert given.use_commfuse
        for refusals in (REFUSALS, ATTENTION_REFUSALS):
            check_compatible(given, refusals)
        read = commfuse_options(given)
        schedule = one.variant.schedule
        assert schedule is not None
        assert read.linear.schedule.lanes == schedule.lanes
        assert read.linear.schedule.chunks == schedule.chunks
        assert read.linear.schedule.taper == schedule.taper
        assert read.attention == one.variant.attention
        assert read.linear.wgrad == one.variant.wgrad
        wgrads.add(read.linear.wgrad)
    assert wgrads == {"whole", "blocks"}


def _given(words: Sequence[str]) -> argparse.Namespace:
    """As Megatron's parser leaves them, with the options that nobody gave."""
    given: dict[str, object] = dict(DEFAULTS)
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            given[name] = True
        else:
            given[name] = word
    return argparse.Namespace(**given)


@pytest.mark.parametrize(
    ("npus", "fixed"),
    [(64, Fixed(tp=8, cp=1, pp=4)), (32, Fixed(tp=4, pp=8)), (64, Fixed(tp=4, cp=2, pp=8))],
)
def test_what_is_printed_describes_what_was_simulated(npus: int, fixed: Fixed) -> None:
    one = recommend(LLAMA3_70B, CLUSTER, npus, fixed=fixed).best
    path = find_config("llama3_70b")
    command = launch(LLAMA3_70B, path, CLUSTER, one)
    assert command is not None
    variables = dict(word.split("=") for word in shlex.split(command) if "=" in word)
    words = options(LLAMA3_70B, one)
    for name, option in (
        ("TP", "--tensor-model-parallel-size"),
        ("PP", "--pipeline-model-parallel-size"),
        ("CP", "--context-parallel-size"),
    ):
        assert words[words.index(option) + 1] == variables[name]
    size = ["--npus-per-node", variables["NPUS_PER_NODE"], "--nnodes", variables["NNODES"]]
    if "--num-layer-list" not in words:
        size += ["--num-layer-list", "none"]
    assert (
        variables["NUM_LAYER_LIST"] == (words + size)[(words + size).index("--num-layer-list") + 1]
    )
    described = ModelConfig.load(path, [*words, *size])
    described.validate()
    assert described.world_size == npus == one.training.npus
    assert described.data_parallel_size == one.layout.dp
    stages = described.num_layer_list or (80 // one.layout.pp,) * one.layout.pp
    assert stages == one.training.layers
    assert described.global_batch_size == (
        one.training.micro_batch * one.training.micro_batches * one.layout.dp
    )
    assert ("--overlap-grad-reduce" in words) == (one.layout.dp * one.layout.cp > 1)


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


@pytest.mark.parametrize("name", ["mine.yaml", "llama3_70b.yaml"])
def test_a_model_of_the_users_gets_options_only(
    name: str, found: Recommendation, tmp_path: Path
) -> None:
    # A launcher of the same name reads another file.
    assert launch(LLAMA3_70B, tmp_path / name, CLUSTER, found.best) is None


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
        (["plan", "--model", "llama3_70b", "--npus", "2"], 1, "take another --npus"),
        (["plan", "--model", "llama3_8b", "--chunks", "4"], 2, "--chunks: no effect"),
        (["plan", "gather", "--npus", "8"], 2, "--npus: no effect on a drawing"),
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
