"""The command that a launcher would start."""

from __future__ import annotations

import shlex
from pathlib import Path

from commfuse_npu.tools.launch_command import launch_command

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MODELS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b")


def dry_run(model: str, *arguments: str, **variables: str) -> list[str]:
    """Its words, environment and all, with nothing in the environment but what is given."""
    _, command = launch_command([model, *arguments], {"DRY_RUN": "1", **variables})
    return shlex.split(command)
