"""Ctrl-C on the terminal of the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from tests.limits import LIMIT
from tests.megatron.in_ranks import TINY

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


@pytest.mark.parametrize("said", ["iteration        2/", "data: "], ids=["training", "starting"])
def test_ctrl_c_on_a_terminal_is_quiet(tmp_path: Path, said: str) -> None:
    command = [sys.executable, "-m", "scripts.cpu_pretraining", *TINY.split()]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path), "--train-iters", "100000"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while said not in (line := process.stdout.readline()):
            assert line, "it ended"
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, out
    assert "Traceback" not in out
