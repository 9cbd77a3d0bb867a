"""A measured trace put into a simulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commfuse_npu.runtime.trace import Event
from commfuse_npu.tools import cli
from commfuse_npu.tools.trace_file import events_of_viewer, shown

WORDS = ["simulate", "--tp", "2", "--dp", "1", "--typical", "--variants", "commfuse-c1-*"]


def _measured(path: Path) -> Path:
    ends = (10, 20), (12, 25)
    events = [[shown(Event("compute", "own", "op", start, end))] for start, end in ends]
    content = {"traceEvents": events_of_viewer(events, ["rank 0, measured", "rank 1, measured"])}
    path.write_text(json.dumps(content))
    return path


def test_measured_ranks_follow_simulated_ones(tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    words = [*WORDS, "--trace", str(both), "--beside", str(_measured(tmp_path / "real.json"))]
    assert cli.main(words) == 0
    events = json.loads(both.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        "rank 0, as all 2 ranks, simulated", "rank 0, measured", "rank 1, measured",
    ]  # fmt: skip
    (first, second) = [e for e in events if e["name"] == "own" and e["ph"] == "X"]
    assert (first["pid"], first["ts"], first["dur"]) == (1, 0.0, 0.01)
    assert (second["pid"], second["ts"]) == (2, 0.002)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"traceEvents": 1}', '{"traceEvents": [{"pid": "a"}]}', "nothing"]
)
def test_what_is_no_trace_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real, both = tmp_path / "real.json", tmp_path / "both.json"
    real.write_text(content)
    assert cli.main([*WORDS, "--trace", str(both), "--beside", str(real)]) == 2
    assert f"--beside {real}" in capsys.readouterr().err
    assert not both.exists()


def test_beside_needs_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--beside", str(_measured(tmp_path / "real.json"))]) == 2
    assert "--beside is for --trace; give both" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--calibrated", "--fit-ratio"])
def test_options_of_another_question_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WORDS, option, "1"]) == 2
    assert f"{option} is for --against; give both, or neither" in capsys.readouterr().err
