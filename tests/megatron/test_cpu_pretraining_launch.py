"""The command in a process of its own: Ctrl-C, a killed rank, a killed launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from tests.limits import LIMIT
from tests.megatron.in_ranks import TINY

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


def start(output: Path, iterations: int = 100_000) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.cpu_pretraining", *TINY.split()),
            *("--output", str(output), "--train-iters", str(iterations)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a process, and its output."""
    out, _ = process.communicate(timeout=LIMIT)
    return process.returncode, out


def until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    while text not in (line := process.stdout.readline()):
        assert line, "it ended"


@pytest.mark.parametrize(
    ("kill", "said"),
    [(os.kill, "iteration        2/"), (os.killpg, "iteration        2/"), (os.killpg, "data: ")],
    ids=["launcher", "terminal", "while ranks start"],
)
def test_ctrl_c_is_quiet(tmp_path: Path, kill: Callable, said: str) -> None:
    with start(tmp_path) as process:
        until(process, said)
        kill(process.pid, signal.SIGINT)
        code, out = ended(process)
    assert code == 130, out
    assert "Traceback" not in out


def test_ranks_go_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        until(process, " iteration        2/")
        process.kill()
        # The output ends when the ranks have closed it, too.
        assert ended(process)[0] == -signal.SIGKILL


def ranks_of(launcher: int) -> list[int]:
    """The ids of the processes that are ranks, in order (Linux)."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [
        int(child)
        for child in sorted(children, key=int)
        if b"--multiprocessing-fork" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_a_rank_that_is_killed_ends_the_launch(tmp_path: Path) -> None:
    with start(tmp_path, 20) as process:
        until(process, " iteration        7/")
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        code, out = ended(process)
    assert code == 1
    assert "error: rank 1 of 2 died in train, by SIGKILL" in out
