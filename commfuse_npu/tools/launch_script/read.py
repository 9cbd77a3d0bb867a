"""The launch that a command would make, or what a launch script would start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import Launch, launch_of
from commfuse_npu.tools.launch_script.shell import Command, capture_commands

__all__ = ["checkout_of", "is_script", "read_launch", "script_folder"]


def checkout_of(folder: Path) -> Path:
    """The nearest folder above that has MindSpeed-LLM's ``pretrain_gpt.py``, or the folder."""
    above = (folder, *folder.parents)
    return next((one for one in above if (one / "pretrain_gpt.py").is_file()), folder)


def is_script(words: Sequence[str]) -> bool:
    """Whether a command is a launch script, with or without a shell before it."""
    return any(word.endswith(".sh") for word in _without_shell(words)[:1])


def script_folder(words: Sequence[str]) -> Path:
    """The folder of the launch script of a command."""
    return Path(_without_shell(words)[0]).expanduser().resolve().parent


def _without_shell(words: Sequence[str]) -> list[str]:
    return list(words[1:] if words and Path(words[0]).name in ("bash", "sh") else words)


def read_launch(
    words: Sequence[str], checkout: Path, environ: Mapping[str, str] = os.environ
) -> Launch:
    """Understand what follows ``--``.

    Args:
        words: the command.
        checkout: MindSpeed-LLM's folder, from which launch scripts are started.
        environ: for launch scripts.

    Raises:
        UsageError: it is none.
    """
    words = _without_shell(words)
    if is_script(words):
        return _from_shell(words, checkout, environ)
    launch = launch_of(Command(words, str(Path.cwd())))
    if launch is None:
        raise UsageError(
            f"the launch {' '.join(words[:6])!r} is none that can be read; give "
            "pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a launch script"
        )
    return launch


def _from_shell(words: Sequence[str], checkout: Path, environ: Mapping[str, str]) -> Launch:
    given = Path(words[0]).expanduser()
    script = next((path for path in (given, checkout / given) if path.is_file()), None)
    if script is None:
        raise UsageError(f"there is no launch script {given} here or in {checkout}")
    captured = capture_commands([str(script.resolve()), *words[1:]], checkout, environ)
    # Scripts also start Python to prepare data.
    launches = [
        launch
        for command in captured.commands
        if (launch := launch_of(command)) is not None
        and (launch.processes is not None or Path(launch.script).name.startswith("pretrain"))
    ]
    if not launches:
        called = [" ".join(command.words[:12]) for command in captured.commands]
        raise UsageError(
            f"{script} starts no pretraining with torchrun or python found by their names.\n"
            f"What it started: {'; '.join(called) or '(nothing)'}\n"
            f"What it printed: {captured.printed.strip() or '(nothing)'}"
        )
    launch = launches[0]
    if len(launches) > 1:
        launch.notes.append(
            f"{script.name} starts {len(launches)} trainings; this is about the first"
        )
    return launch
