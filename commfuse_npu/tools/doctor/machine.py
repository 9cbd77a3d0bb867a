"""The machine as the checks see it: its variables, its packages, its commands.

Tests can define their own machine.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.packages import Package, find_package

__all__ = ["ABSENT", "CommandResult", "Machine", "run_command"]

ABSENT = 127
"""The exit code if there is no such command, as in a shell."""


@dataclass(frozen=True)
class CommandResult:
    """The output of a command; ``exit_code`` is ``None`` if it did not end in time."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


# Several checks run the same command, and npu-smi is slow.
@functools.cache
def run_command(*command: str) -> CommandResult:
    """Run a command, for at most 60 s."""
    try:
        process = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return CommandResult(ABSENT, f"there is no {command[0]}")
    except OSError as error:
        return CommandResult(126, str(error))
    except subprocess.TimeoutExpired:
        return CommandResult(None, "no answer within 60 s")
    return CommandResult(process.returncode, process.stdout)


@dataclass(frozen=True)
class Machine:
    """What the checks need to know about a machine.

    Attributes:
        variables: of the environment.
        find: finds a package by its import name; returns ``None`` if there is none.
        run: runs a command.
        cann: the folder of CANN unless a variable names another.
    """

    variables: Mapping[str, str]
    find: Callable[[str], Package | None]
    run: Callable[..., CommandResult] = run_command
    cann: Path = Path("/usr/local/Ascend/ascend-toolkit/latest")

    @classmethod
    def this(cls) -> Machine:
        variables = dict(os.environ)
        return cls(variables, lambda name: find_package(name, variables))
