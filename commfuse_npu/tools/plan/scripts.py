"""Runs the launch scripts below a folder with recorders, and identifies those that train."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import Launch, checkout_of, launch_of
from commfuse_npu.tools.launch_script.shell import Captured, Command, capture_commands
from commfuse_npu.tools.plan.sandbox import Sandbox

__all__ = ["Script", "find_scripts", "read_scripts"]

_TRAINING = re.compile(r"(pre|post|pos)?train[\w.-]*\.py|finetune[\w.-]*\.py")
_MEGATRONS = ("--num-layers", "--tensor-model-parallel-size", "--micro-batch-size")
_OTHERS = _MINDSPORE, _OTHER_TRAINER, _NO_TRAINING = (
    "trains with MindSpore",
    "trains without Megatron's options",
    "generation, evaluation, conversion or data",
)


class Script(NamedTuple):
    """A script, by its path below the folder, and what it would start.

    Attributes:
        trainings: launches that train with Megatron's options.
        other: what it does if it has none and there was no error.
        error: why it could not be read.
        sandbox: how it was run.
    """

    name: str
    sandbox: str
    trainings: Sequence[Launch] = ()
    other: str = ""
    error: str = ""


def find_scripts(folder: Path) -> list[Path]:
    """Launch scripts, ``*.sh``, in a folder or below it; hidden ones are left out.

    Raises:
        UsageError: there are none.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*.sh") if not path.is_dir())
    scripts = sorted(path for path in paths if not any(p.startswith(".") for p in path.parts))
    if not scripts:
        raise UsageError(
            f"{str(folder)!r} has no launch scripts, *.sh, in it or below it; give a folder "
            "that has, as MindSpeed-LLM's examples"
        )
    return scripts


def read_scripts(folder: Path, scripts: list[Path], timeout: float) -> Iterator[Script]:
    """Read each script of :func:`find_scripts`, with a limit of ``timeout`` seconds.

    They are started from MindSpeed-LLM's folder, as its examples require, or else from the folder
    itself.

    Raises:
        UsageError: the folder cannot be copied.
    """
    folder = folder.resolve()
    root = checkout_of(folder)
    with tempfile.TemporaryDirectory(prefix="commfuse_plan_") as temporary:
        scratch = Path(temporary).resolve()
        if root in scratch.parents:
            raise UsageError(
                f"{root} holds the folder of temporary files, {scratch.parent}; set TMPDIR to "
                "one elsewhere"
            )
        sandbox = Sandbox(root, scratch)
        for script in scripts:
            sandbox.renew()
            below = (folder / script).relative_to(root)
            try:
                if not (sandbox.copy / below).is_file():
                    raise UsageError("it is no file of at most 1 MB that can be read")
                captured = capture_commands(
                    [str(sandbox.place / below)],
                    sandbox.copy,
                    {**os.environ, "TMPDIR": str(scratch)},
                    timeout,
                    sandbox.inside,
                    scratch,
                )
                yield Script(str(script), sandbox.description, *_understood(captured))
            except UsageError as error:
                message = str(error).replace(str(sandbox.place / below), "it")
                yield Script(str(script), sandbox.description, error=message)


def _understood(captured: Captured) -> tuple[list[Launch], str]:
    """The trainings; or, if there are none, what the script does."""
    trainings, reasons = [], []
    for command in captured.commands:
        other = _other(command)
        launch = None if other else launch_of(command)
        if launch is None and not other:
            raise UsageError(
                f"it starts a training by {' '.join(command.words[:4])!r} ..., which is not "
                "understood; start the Python script by torchrun or python"
            )
        if launch is None or "--skip-train" in launch.options:
            reasons.append(other or _NO_TRAINING)
        else:
            trainings.append(launch)
    if not captured.commands and captured.code:
        *_, last = captured.printed.strip().splitlines() or ["nothing"]
        raise UsageError(
            f"it ended with code {captured.code} before it started anything; it printed last: "
            f"{last[:200]}"
        )
    return trainings, "" if trainings else min(reasons, key=_OTHERS.index, default="starts nothing")


def _other(command: Command) -> str:
    """What a command does if it is not a training with Megatron's options; empty if it is."""
    words = list(command.words)
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None or not _TRAINING.fullmatch(Path(words[place]).name):
        return _NO_TRAINING
    if words[0] == "msrun":
        return _MINDSPORE
    options = {word.partition("=")[0] for word in words[place + 1 :]}
    return "" if options.intersection(_MEGATRONS) else _OTHER_TRAINER
