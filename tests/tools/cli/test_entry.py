"""How the command is called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commfuse_npu import __version__
from commfuse_npu.tools.cli import main


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commfuse_npu", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.stdout == f"commfuse-npu {__version__}\n"


@pytest.mark.parametrize(
    "command",
    ["", "doctor", "plan", "simulate", "bench", "measure", "verify"],
)
def test_help_is_for_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: commfuse-npu {command}")
    assert "`" not in text
