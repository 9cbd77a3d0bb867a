"""The CPU pretraining as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["compare"]

_ROOT = Path(__file__).resolve().parents[2]


def compare(folder: Path, *options: str) -> str:
    """What two iterations of one layer with ``--compare`` print; they have to be identical."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.cpu_pretraining.launch", *options),
            *("--compare", "--runs-dir", str(folder)),
            *("--train-iters", "2", "--eval-interval", "0", "--num-layers", "1", "--bf16"),
        ],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "identical: True"
    return done.stdout
