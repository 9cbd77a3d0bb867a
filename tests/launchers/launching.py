"""The command that a launcher would start, and a helper that runs commands."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from commfuse_npu.tools.launch_command import launch_command
from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MODELS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b")


def dry_run(model: str, *arguments: str, **variables: str) -> list[str]:
    """Words of the command, environment included; only ``variables`` are set."""
    _, command = launch_command([model, *arguments], {"DRY_RUN": "1", **variables})
    return shlex.split(command)


def started(
    *command: str, env: Mapping[str, str] | None = None, folder: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command; returns its exit code and output."""
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
