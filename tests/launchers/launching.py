"""The command that a launcher would start, and a helper that runs commands."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MODELS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b")
NODE = {"MASTER_ADDR": "node0", "NODE_RANK": "0"}
FILES = {"DATA_PATH": "/data", "TOKENIZER_MODEL": "/tokenizer"}


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Starts ``launch_pretraining.sh``; only ``variables`` and the path are set."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables}
    return started("bash", str(SCRIPTS / "launch_pretraining.sh"), *words, env=environment)


def dry_run(model: str, *arguments: str, **variables: str) -> list[str]:
    """Words of the command that a launcher would start."""
    done = launch(model, *arguments, **{"DRY_RUN": "1", **NODE, **FILES, **variables})
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def started(
    *command: str, env: Mapping[str, str] | None = None, folder: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command; returns its exit code and output."""
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
