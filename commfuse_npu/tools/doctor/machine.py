"""What can be asked about a machine: its variables, its packages, its commands.

A machine can be made up, for tests.  Packages are found and their versions read from their files,
without importing them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CommandResult", "Machine", "Package", "find_package", "run_command"]


@dataclass(frozen=True)
class Package:
    """A package that was found, and where: a namespace may be in several folders."""

    version: str | None
    folders: tuple[Path, ...] = ()

    def folder_with(self, file: str) -> Path | None:
        return next((folder for folder in self.folders if (folder / file).exists()), None)


@dataclass(frozen=True)
class CommandResult:
    """What a command said; ``exit_code`` is ``None`` if it had to be stopped."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def find_package(name: str, variables: Mapping[str, str]) -> Package | None:
    """Where ``import name`` would find a package, or would if started in MindSpeed-LLM's root."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        homes = ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")
        paths = [os.getcwd(), *filter(None, map(variables.get, homes))]
        spec = importlib.machinery.PathFinder.find_spec(name, paths)
    if spec is None:
        return None
    folders = tuple(map(Path, spec.submodule_search_locations or ()))
    return Package(_version(name, folders), folders)


def _version(name: str, folders: tuple[Path, ...]) -> str | None:
    # What lies beside the code tells about this code; metadata may be of another copy.
    for folder in folders:
        info, setup = folder / "core" / "package_info.py", folder.parent / "setup.py"
        if name == "megatron" and info.exists():
            numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.M)
            return ".".join(numbers)
        if name != "megatron" and setup.exists():
            found = re.search(r"^__version__ = ['\"](.+)['\"]", setup.read_text("utf-8"), re.M)
            if found is not None:
                return found[1]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
