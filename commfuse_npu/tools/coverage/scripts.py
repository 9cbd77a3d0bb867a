"""Runs the launch scripts below a folder with recorders, and tells trainings from the rest."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.coverage.sandbox import Sandbox, sandbox
from commfuse_npu.tools.coverage.scratch import ScratchCopy
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import Launch, launch_of
from commfuse_npu.tools.launch_script.shell import Captured, Command, capture_commands

__all__ = ["Reader", "Script"]

_TRAINING = re.compile(r"(pre|post|pos)?train[\w.-]*\.py|finetune[\w.-]*\.py")
_MEGATRONS = ("--num-layers", "--tensor-model-parallel-size", "--micro-batch-size")
_NOTHING = "starts nothing"
_MINDSPORE = "trains with MindSpore"
_OTHER_TRAINER = "trains without Megatron's options"
_NO_TRAINING = "generation, evaluation, conversion or data"


@dataclass(frozen=True)
class Script:
    """What a script would start.

    Attributes:
        name: its path below the folder.
        trainings: launches that train with Megatron's options.
        other: what it is if there are none, and nothing went wrong.
        error: why it could not be read.
    """

    name: str
    trainings: list[Launch] = field(default_factory=list)
    other: str = ""
    error: str = ""


class Reader:
    """Reads the scripts below a folder.

    They are started from the nearest folder above that has MindSpeed-LLM's ``pretrain_gpt.py``, as
    its examples want to be, or else from the folder itself.

    Args:
        folder: with launch scripts, ``*.sh``, in it or below it.
        timeout: for a script, in seconds.

    Attributes:
        scripts: their paths below the folder.

    Raises:
        UsageError: there are none.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        if not folder.is_dir():
            raise UsageError(f"{str(folder)!r} is no folder; give one with launch scripts")
        self._folder, self._timeout = folder.resolve(), timeout
        found = (path for path in self._folder.rglob("*.sh") if not path.is_dir())
        below = (path.relative_to(self._folder) for path in found)
        self.scripts = sorted(
            path for path in below if not any(part.startswith(".") for part in path.parts)
        )
        if not self.scripts:
            raise UsageError(
                f"{str(folder)!r} has no launch scripts, *.sh, in it or below it; give a folder "
                "that has, as MindSpeed-LLM's examples"
            )
        above = (self._folder, *self._folder.parents)
        self._root = next((one for one in above if (one / "pretrain_gpt.py").is_file()), above[0])

    def read(self, environ: Mapping[str, str] = os.environ) -> tuple[Sandbox, Iterator[Script]]:
        """The sandbox that works here, and each script as it has been read.

        Raises:
            UsageError: the folder cannot be copied.
        """
        temporary = tempfile.TemporaryDirectory(prefix="commfuse_coverage_")
        scratch = Path(temporary.name).resolve()
        if self._root in scratch.parents:
            temporary.cleanup()
            raise UsageError(
                f"{self._root} holds the folder of temporary files, {scratch.parent}; set TMPDIR "
                "to one elsewhere"
            )
        copy = ScratchCopy(self._root, scratch / "copy")
        used = sandbox(scratch, copy.place, self._root)

        def scripts() -> Iterator[Script]:
            with temporary:
                for script in self.scripts:
                    copy.renew()
                    yield self._read(script, copy, used, {**environ, "TMPDIR": str(scratch)})

        return used, scripts()

    def _read(
        self, script: Path, copy: ScratchCopy, used: Sandbox, environ: Mapping[str, str]
    ) -> Script:
        scratch = copy.place.parent
        below = (self._folder / script).relative_to(self._root)
        place = self._root if used.in_place else copy.place
        if not (copy.place / below).is_file():
            return Script(str(script), error="it is no file of at most 1 MB that can be read")
        try:
            captured = capture_commands(
                [str(place / below)],
                copy.place,
                environ,
                self._timeout,
                used.inside(scratch, copy.place, self._root),
                scratch,
            )
            return _understood(str(script), captured)
        except UsageError as error:
            return Script(str(script), error=str(error).replace(str(place / below), "it"))


def _understood(name: str, captured: Captured) -> Script:
    trainings, others = [], []
    for command in captured.commands:
        if other := _other(command):
            others.append(other)
            continue
        launch = launch_of(command)
        if launch is None:
            raise UsageError(
                f"it starts a training by {' '.join(command.words[:4])!r} ..., which is not "
                "understood; start the Python script by torchrun or python"
            )
        if "--skip-train" in launch.options:
            others.append(_NO_TRAINING)
        else:
            trainings.append(launch)
    if trainings:
        return Script(name, trainings)
    if captured.commands:
        return Script(name, other=sorted(others, key=_OTHERS.index)[0])
    if captured.code:
        printed = captured.printed.strip().splitlines() or ["nothing"]
        return Script(
            name,
            error=f"it ended with code {captured.code} before it started anything; it printed "
            f"last: {printed[-1][:200]}",
        )
    return Script(name, other=_NOTHING)


_OTHERS = (_MINDSPORE, _OTHER_TRAINER, _NO_TRAINING)


def _other(command: Command) -> str:
    """What a command is, if no training with Megatron's options."""
    words = list(command.words)
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None or not _TRAINING.fullmatch(Path(words[place]).name):
        return _NO_TRAINING
    if words[0] == "msrun":
        return _MINDSPORE
    options = {word.partition("=")[0] for word in words[place + 1 :]}
    return "" if options.intersection(_MEGATRONS) else _OTHER_TRAINER
