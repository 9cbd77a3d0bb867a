"""The machine as the checks see it: its variables, its packages, its commands.

Tests can define their own machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.packages import Package, find_package

__all__ = ["CommandResult", "Machine", "run_command"]


@dataclass(frozen=True)
class CommandResult:
    """The output of a command; ``exit_code`` is ``None`` if it did not end in time."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run_command(command: Sequence[str], variables: Mapping[str, str]) -> CommandResult | None:
    """Run a command, for at most 60 s; ``None`` if there is no command of that name."""
    try:
        process = subprocess.run(
            command,
            env=dict(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return None
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
        run: runs a command with these variables; returns ``None`` if there is no such command.
        cann: the folder of CANN unless a variable names another.
    """

    variables: Mapping[str, str]
    find: Callable[[str], Package | None]
    run: Callable[[Sequence[str], Mapping[str, str]], CommandResult | None] = run_command
    cann: Path = Path("/usr/local/Ascend/ascend-toolkit/latest")

    @classmethod
    def this(cls) -> Machine:
        variables = dict(os.environ)
        answers: dict[tuple[str, ...], CommandResult | None] = {}

        def run(command: Sequence[str], variables: Mapping[str, str]) -> CommandResult | None:
            # Cached: several checks run the same command, and npu-smi is slow.
            key = tuple(command)
            if key not in answers:
                answers[key] = run_command(command, variables)
            return answers[key]

        return cls(variables, lambda name: find_package(name, variables), run)
