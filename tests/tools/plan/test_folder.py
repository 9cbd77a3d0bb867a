"""A folder of launch scripts: a row for each, those with the largest gain first."""

import json
import os
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from tests.tools.plan.launches import MODEL, TP
from tests.tools.plan.reports import assert_consistent

TORCHRUN = "torchrun --nnodes 1 --nproc_per_node 4"
MANY = "--global-batch-size 32 --vocab-size 32000"
SCRIPTS = {
    "a/alone.sh": f"{TORCHRUN} pretrain_gpt.py {MODEL} {MANY}",
    "b/overlap.sh": f"{TORCHRUN} pretrain_gpt.py {MODEL} {TP} {MANY}",
    "c/not_divisible.sh": f"{TORCHRUN} pretrain_gpt.py {MODEL} {TP} --num-attention-heads 6",
    "c/unread.sh": 'torchrun --nproc_per_node "$(npu-smi info | wc -l)" pretrain_gpt.py',
    "infer.sh": f"{TORCHRUN} inference.py {MODEL} {TP}",
    "convert.sh": "python convert_ckpt.py --load-model-type hf",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, line in SCRIPTS.items():
        path = tmp_path / "scripts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n", "utf-8")
    return tmp_path / "scripts"


def test_each_launch_has_a_row(folder: Path, tmp_path: Path, capsys) -> None:
    answer = tmp_path / "answer.json"
    assert cli.main(["plan", str(folder), "--json", str(answer)]) == 0
    out = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:3]] == ["b/overlap.sh", "a/alone.sh"]
    _, _, best, gain, _, machine, change = rows[1]
    assert (best, machine, change) == ("overlap", "A2", "add `--commfuse-overlap`")
    assert float(gain.split(" %")[0]) > 1
    assert rows[2][-1].startswith("Nothing to change.")
    others = {row[0]: row[-1] for row in rows[3:]}
    assert "would fail at its start" in others["c/not_divisible.sh"]
    assert "--nproc-per-node" in others["c/unread.sh"]
    assert "4 launches; 2 other scripts start no training." in out
    plans = json.loads(answer.read_text("utf-8"))
    assert plans["b/overlap.sh"]["verdict"].startswith("Add `--commfuse-overlap`: ")
    assert set(plans.pop("c/unread.sh")) == {"error"}
    for report in plans.values():
        assert_consistent(report)


LLM = os.environ.get("MINDSPEED_LLM_HOME")


@pytest.mark.long
@pytest.mark.skipif(LLM is None, reason="MINDSPEED_LLM_HOME names no checkout of MindSpeed-LLM")
def test_launches_of_mindspeed_llm_have_no_contradictions(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    assert cli.main(["plan", f"{LLM}/examples/mcore", "--json", str(answer)]) == 0
    plans = json.loads(answer.read_text("utf-8"))
    assert len(plans) > 50
    for report in plans.values():
        if "error" not in report:
            assert_consistent(report)
