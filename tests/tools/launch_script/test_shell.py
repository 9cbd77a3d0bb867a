"""What a launch script would start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.shell import capture_commands

SCRIPTS = Path(__file__).parents[3] / "scripts"
MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4607")


def test_our_own_script_reads_its_configuration(tmp_path: Path) -> None:
    """The one program that does run; with a recorder in its place the launch had no model."""
    (tmp_path / "pretrain_gpt.py").touch()
    script = [str(SCRIPTS / "pretrain_llama3_8b_ptd.sh"), *MOCK]
    environment = {**os.environ, "MINDSPEED_LLM_HOME": str(tmp_path)}
    captured = capture_commands(script, tmp_path, environment)
    assert len(captured.commands) == 1, captured.printed
    words = list(captured.commands[0].words)
    assert words[0] == "torchrun"
    assert words[words.index("--hidden-size") + 1] == "4096"
    assert "" not in words


def test_another_module_is_written_down_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("python3 -m json.tool --nothing\n", "utf-8")
    captured = capture_commands([str(script)], tmp_path, dict(os.environ))
    words = [list(one.words) for one in captured.commands]
    assert words == [["python3", "-m", "json.tool", "--nothing"]]
    assert (captured.printed, captured.code) == ("", 0)


def test_what_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """Also where a child holds what the script prints to."""
    script = tmp_path / "launch.sh"
    script.write_text(f"/bin/sleep 100 & echo $! > {tmp_path}/child\nwait\n", "utf-8")
    with pytest.raises(UsageError, match=r"did not end within 0\.5 s"):
        capture_commands([str(script)], tmp_path, dict(os.environ), timeout=0.5)
    status = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    end = time.monotonic() + 30
    while status.exists() and status.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_what_is_left_in_the_background_is_written_down(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("torchrun pretrain_gpt.py --bf16 > log 2>&1 &\nexit 3\n", "utf-8")
    captured = capture_commands([str(script)], tmp_path, dict(os.environ))
    assert [one.words[0] for one in captured.commands] == ["torchrun"]
    assert captured.code == 3


def test_programs_by_their_names_stay_replaced_with_another_search_path(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.touch()
    script = tmp_path / "launch.sh"
    script.write_text(f"export PATH=/usr/bin:/bin:$PATH\nrm {precious}\n", "utf-8")
    assert capture_commands([str(script)], tmp_path, dict(os.environ)).code == 0
    assert precious.exists()
