"""What a launch script would start."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_patches.rehearsal.shell_launch import capture_commands

SCRIPTS = Path(__file__).parents[2] / "scripts"
MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4607")


def test_our_own_script_reads_its_configuration(tmp_path: Path) -> None:
    """The one program that does run; with a recorder in its place the launch had no model."""
    (tmp_path / "pretrain_gpt.py").touch()
    script = [str(SCRIPTS / "pretrain_llama3_8b_ptd.sh"), *MOCK]
    environment = {**os.environ, "MINDSPEED_LLM_HOME": str(tmp_path)}
    commands, printed = capture_commands(script, tmp_path, environment)
    assert len(commands) == 1, printed
    words = list(commands[0].words)
    assert words[0] == "torchrun"
    assert words[words.index("--hidden-size") + 1] == "4096"
    assert "" not in words


def test_another_module_is_written_down_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("python3 -m json.tool --nothing\n", "utf-8")
    commands, printed = capture_commands([str(script)], tmp_path, dict(os.environ))
    assert [list(one.words) for one in commands] == [["python3", "-m", "json.tool", "--nothing"]]
    assert not printed
