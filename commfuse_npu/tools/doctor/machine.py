"""What can be asked about a machine: its variables, its packages, its commands.

A machine can be made up, for tests.
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
    """What a command said; ``exit_code`` is ``None`` if it had to be stopped."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run_command(command: Sequence[str], variables: Mapping[str, str]) -> CommandResult | None:
    """Run a command with time limit; ``None`` if there is none of that name."""
    try:
        done = subprocess.run(
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
    return CommandResult(done.returncode, done.stdout)


@dataclass(frozen=True)
class Machine:
    """What can be asked about a machine.

    Attributes:
        variables: of the environment.
        find: a package by the name that is imported, or ``None``.
        run: a command with these variables, or ``None`` if there is no such command.
        cann: where CANN is unless a variable says otherwise.
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
            # Several checks ask the same, and npu-smi takes its time.
            asked = tuple(command)
            if asked not in answers:
                answers[asked] = run_command(command, variables)
            return answers[asked]

        return cls(variables, lambda name: find_package(name, variables), run)
