"""``commfuse-npu plan LAUNCH.sh``: the fastest form of a launch, and the obstacles of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import cli
from tests.tools.answers import answer
from tests.tools.plan.launches import CONFIG, EXPERTS, MODEL, TP, script

Plan = Callable[..., dict[str, Any]]
MANY = "--global-batch-size 64 --bf16"
WIDE = "--global-batch-size 1 --nproc_per_node 16 --tensor-model-parallel-size 16"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A function that runs ``plan`` on a launch with given options and returns its JSON."""

    def ask(options: str, *words: str, code: int = 0) -> dict[str, Any]:
        path = tmp_path / "launch.sh"
        path.write_text(script(options), "utf-8")
        return answer(tmp_path, "plan", str(path), *words, code=code)

    return ask


def by_flags(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {form["flags"].split(" ")[0]: form for form in found["forms"]}


def test_the_fastest_form_that_can_be_launched_is_named(plan: Plan, capsys) -> None:
    report = plan(f"{TP} {MANY}")
    forms = by_flags(report)
    assert report["verdict"].startswith("Add --commfuse-fb-overlap: ")
    assert capsys.readouterr().out.startswith(report["verdict"])
    assert not any(form["obstacle"] for form in forms.values())
    times = {flag: form["seconds"] for flag, form in forms.items()}
    assert min(times, key=times.__getitem__) == "--commfuse-fb-overlap"
    assert times["--use-commfuse"] < times[""]
    assert {"--use-ascend-coc", "--use-ascend-mc2"} < set(forms)
    assert report["notes"][0] == "no --vocab-size: simulated with 32000 tokens"
    beside = "with --commfuse-fb-overlap 97% of a stage's forwards run beside a backward"
    assert report["notes"][-1] == beside
    vocabulary = plan(f"{TP} {MANY} --padded-vocab-size 128256")
    assert by_flags(vocabulary)[""]["seconds"] > times[""]
    assert not [note for note in vocabulary["notes"] if "vocab" in note]


@pytest.mark.parametrize(
    ("options", "verdict", "reason"),
    [
        (f"{MANY} --pipeline-model-parallel-size 2 --seq-length 8192",
         "Add --commfuse-fb-overlap --commfuse-fb-overlap-memory", ""),
        (f"{MANY} {EXPERTS}", "Add --commfuse-fb-overlap", "16 ranks of experts"),
        (f"{MANY} --tp-2d", "Add ", "--tp-2d: linear layers cut in two dimensions"),
        (f"{MANY} --nproc_per_node 16 --tensor-model-parallel-size 16", "Add ",
         "a group of 16 spans nodes of 8 NPUs"),
        ("--tensor-model-parallel-size 1 --no-sequence-parallel", "Nothing to add: no forward-"
         "backward overlap (no tensor, expert or context parallelism, so nothing to hide), no "
         "fused layers (--tensor-model-parallel-size 1: a group of one transfers nothing; ", ""),
        ("--global-batch-size 2", "Add --use-ascend-mc2", ""),
        # Short blocks: nothing would be fused.
        (WIDE, "Nothing to add: no forward-backward overlap (one micro-batch", "a group of 16"),
        (f"{WIDE} --commfuse-chunks 1", "Add --use-commfuse: fused layers. The gain is", "spans"),
    ],
)  # fmt: skip
def test_what_is_not_simulated_or_refused_is_said(
    plan: Plan, options: str, verdict: str, reason: str
) -> None:
    report = plan(f"{TP} {options}")
    assert report["verdict"].startswith(verdict)
    (said,) = [note for note in report["notes"] if "simulated: " in note] or [""]
    assert reason in said


def test_a_refused_form_is_not_recommended(plan: Plan) -> None:
    report = plan(f"{TP} {MANY} --use-ascend-mc2")
    forms = by_flags(report)
    assert "inside of MC2's kernels" in forms["--commfuse-fb-overlap"]["obstacle"]
    assert "--use-ascend-mc2" in forms["--use-commfuse"]["obstacle"]
    assert forms["--use-ascend-mc2"]["used"]
    coc = forms["--use-ascend-coc"]["obstacle"]
    assert coc == "--use-ascend-mc2: MindSpeed refuses CoC and MC2 together; leave it out"
    assert report["verdict"].startswith("Nothing to add: MC2 is in use, no forward-backward")
    forms = by_flags(plan(f"{TP} {MANY} --use-commfuse --commfuse-ulysses"))
    reason = "--commfuse-ulysses needs --context-parallel-size of at least 2: "
    assert forms["--use-commfuse"]["obstacle"].startswith(reason)
    assert not forms["--commfuse-fb-overlap"]["obstacle"]
    # If blocks are too short, Megatron's order runs.
    short = f"{TP} {MANY} --seq-length 1024"
    forms = by_flags(plan(short))
    assert forms["--use-commfuse"]["seconds"] == forms[""]["seconds"]
    fused = by_flags(plan(f"{short} --commfuse-chunks 1"))
    assert fused["--use-commfuse"]["seconds"] > fused[""]["seconds"]


def test_a_form_that_may_need_more_memory_than_there_is_is_named(plan: Plan) -> None:
    stages = f"{TP} {MANY} --pipeline-model-parallel-size 2"
    tight = plan(f"{stages} --num-layers 48")
    assert tight["verdict"].endswith("MiB of an NPU are usable.")
    megatron, overlap = (form["mebibytes"] for form in tight["forms"][:2])
    assert megatron <= tight["usable"] < overlap
    # Overlap in 1F1B that takes more memory is not for a virtual pipeline.
    virtual = plan(f"{stages} --num-virtual-stages-per-pipeline-rank 2")
    flags = [report["forms"][1]["flags"] for report in (tight, virtual)]
    assert flags == ["--commfuse-fb-overlap --commfuse-fb-overlap-memory", "--commfuse-fb-overlap"]


def test_scripts_start_from_mindspeed_llms_root(tmp_path: Path) -> None:
    """As its examples expect; they source other files relative to it."""
    examples = tmp_path / "examples"
    examples.mkdir()
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "sizes.sh").write_text(f"SIZES='{TP} {MODEL}'\n", "utf-8")
    started = "torchrun --nproc_per_node 4 pretrain_gpt.py $SIZES"
    (examples / "it.sh").write_text(f"source sizes.sh\ncd $(dirname $0)/..\n{started}\n")
    assert answer(tmp_path, "plan", str(examples / "it.sh"))["layout"].startswith("TP 4, PP 1")


def test_another_machine_has_other_times(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    server = plan(f"{TP} {MANY}")
    other = plan(f"{TP} {MANY}", "--hardware", "ascend_910c_supernode")
    times = [by_flags(report)["--use-commfuse"]["seconds"] for report in (server, other)]
    assert times[0] != times[1]
    for name, expected in (("Ascend910", other), ("310P3", server)):
        npus = [(name, "OK")] * 2
        monkeypatch.setattr("commfuse_npu.tools.plan.command.listed_npus", lambda _, n=npus: n)
        assert plan(f"{TP} {MANY}")["hardware"] == expected["hardware"]


def test_what_would_be_fused_and_what_is_wrong_is_listed(plan: Plan, capsys) -> None:
    report = plan(f"{TP} {MANY} --use-commfuse")
    assert {layer["layer"]: layer["operator"] for layer in report["layers"]} == {
        **dict.fromkeys(("qkv", "fc1", "output"), "all_gather_linear"),
        **dict.fromkeys(("proj", "fc2"), "linear_reduce_scatter"),
    }
    printed = capsys.readouterr().out
    assert "Note: --use-commfuse is given to the script itself, which does not know" in printed
    assert f"forward, per rank ({report['schedule']}):\n  qkv: all_gather_linear\n" in printed
    assert plan(f"{TP} {MANY} --use-ascend-coc")["layers"]
    printed = capsys.readouterr().out
    assert "per rank" not in printed
    assert printed.count("it replaces Megatron's column- and row-parallel linear layers") == 1
    split = plan(f"{TP} {MANY} --use-commfuse --commfuse-attention")
    rough = "--commfuse-attention: simulated without splitting attention by queries"
    assert rough in split["notes"]
    wrong = plan("--tensor-model-parallel-size 3 --sequence-parallel", code=1)
    assert wrong["verdict"].startswith("As it is, the launch would fail at its start: 16 attention")
    assert (wrong["layers"], wrong["schedule"]) == ([], "")
    assert f"\nerror: {wrong['problems'][0]}\n" in capsys.readouterr().out


def test_a_configuration_is_the_launch_of_its_launcher(tmp_path: Path, capsys) -> None:
    page = tmp_path / "found.json"
    words = ["plan", str(CONFIG), "--json", str(page), "--", "--commfuse-chunks", "4"]
    assert cli.main(words) == 0
    report = json.loads(page.read_text("utf-8"))
    assert report["name"] == "llama3_8b"
    assert report["layout"].startswith("TP 8, PP 1, CP 1, DP 1, sequence parallel")
    assert "4 chunks" in report["schedule"]
    with pytest.raises(SystemExit):
        cli.main(["plan", str(tmp_path), "--", "--commfuse-chunks", "4"])
    assert "-- --commfuse-chunks: no effect on" in capsys.readouterr().err
