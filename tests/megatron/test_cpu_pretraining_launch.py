"""The command and its ranks end together: by Ctrl-C on a terminal, SIGTERM and SIGKILL."""

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
from tests.processes import ended, wait_for

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        (signal.SIGINT, "data: ", 130),
        (signal.SIGINT, "iteration        2/", 130),
        (signal.SIGTERM, "iteration        2/", 143),
        (signal.SIGKILL, "iteration        2/", -9),
    ],
)
def test_no_rank_outlives_the_command(tmp_path: Path, how: int, said: str, code: int) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
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
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = listed.read_text().split() if listed.exists() else []  # on Linux
        if how == signal.SIGINT:  # a terminal sends it to all
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == code, out
    assert "Traceback" not in out
    wait_for(lambda: all(ended(int(child)) for child in children))
    # Nothing can clean up after SIGKILL.
    assert how == signal.SIGKILL or not list(folder.iterdir())
