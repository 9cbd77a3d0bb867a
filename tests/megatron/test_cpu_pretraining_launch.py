"""Ctrl-C on the terminal of the command, and SIGTERM."""

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


TRAINING = "iteration        2/"


@pytest.mark.parametrize(
    ("how", "said"),
    [(signal.SIGINT, "data: "), (signal.SIGINT, TRAINING), (signal.SIGTERM, TRAINING)],
)
def test_a_signal_ends_it_quietly_and_leaves_no_files(tmp_path: Path, how: int, said: str) -> None:
    (folder := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "scripts.cpu_pretraining", *TINY.split()]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path), "--train-iters", "100000"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        while said not in (line := process.stdout.readline()):
            assert line, "it ended"
        # A terminal sends Ctrl-C to all processes.
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + how, out
    assert "Traceback" not in out
    assert not list(folder.iterdir())
