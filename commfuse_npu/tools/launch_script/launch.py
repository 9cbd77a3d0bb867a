"""A launch as data: read from a command line as typed, or from what a script would start.

Supported are ``pretrain_gpt.py ARGS`` and ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``).  Each may have ``-m mindspeed_patches.launch``
before the script, and ``cd FOLDER &&`` and assignments before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.shell import Command, capture_commands

__all__ = ["Launch", "read_launch"]

_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_COUNTED_BY_TORCHRUN = ("auto", "cpu", "gpu", "npu", "xpu")
_MOST_PROCESSES = 1 << 20
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)


@dataclass
class Launch:
    """A script with its options, and where it is started.

    Attributes:
        nodes, per_node: number of nodes, and of processes on each; ``None`` if not given.
        environment: variables that the launch sets.
        notes: remarks for the reader on how it was read.
        registers: whether it registers CommFuse before the script runs.
    """

    script: str
    options: Options
    nodes: int | None
    per_node: int | None
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    registers: bool = False

    @property
    def processes(self) -> int | None:
        """Number of processes over all nodes."""
        return self.nodes * self.per_node if self.nodes and self.per_node else None

    def script_path(self, checkout: Path) -> Path:
        """Path of the script, in the :meth:`start_folder`."""
        return (self.start_folder(checkout) / self.script).resolve()

    def start_folder(self, checkout: Path) -> Path:
        """The folder with the script, the base of relative paths: the launch's or MindSpeed-LLM's.

        Raises:
            UsageError: the script is in neither.
        """
        for folder in (self.folder, checkout):
            if (folder / self.script).is_file():
                return folder
        raise UsageError(
            f"there is no {self.script} in {self.folder} or in {checkout}; give its path"
        )


def _launch_of(command: Command) -> Launch | None:
    """Parse a command; ``None`` if it is not a launch."""
    words = list(command.words)
    nodes = per_node = None
    program = Path(words[0]).name if words else ""
    by_torchrun = program == "torchrun"
    if by_torchrun or re.fullmatch(r"python[\d.]*", program):
        words = words[1:]
        while not by_torchrun and words and re.fullmatch(r"-[uBOsSEI]+", words[0]):
            words.pop(0)
        if words[:1] == ["-m"] and words[1:2] and words[1] in _TORCHRUN_MODULES:
            by_torchrun, words = True, words[2:]
    if by_torchrun:
        words, nodes, per_node = _torchrun(words)
    registers = words[:2] == ["-m", _LAUNCH_MODULE]
    script, *arguments = words[2 * registers :] or [""]
    if not script.endswith(".py"):
        return None
    folder, environment = Path(command.folder), dict(command.environment)
    options = Options(arguments)
    return Launch(script, options, nodes, per_node, folder, environment, registers=registers)


def _torchrun(words: Sequence[str]) -> tuple[list[str], int | None, int | None]:
    """The words after torchrun's own options, the number of nodes and of processes on each."""
    place = next((i for i, w in enumerate(words) if w == "-m" or w.endswith(".py")), len(words))
    own = (w.replace("_", "-") if w.startswith("--") else w for w in words[:place])
    options = Options(["--torchrun", *own])  # short options, as -t 3, may come first

    def number(option: str) -> int | None:
        # A range of nodes, MIN:MAX, counts as its maximum.
        text = (options.values(option) or ["1"])[0].rpartition(":")[2]
        if text in _COUNTED_BY_TORCHRUN:
            return None
        if not text.isdecimal() or not 0 < int(text[:9]) <= _MOST_PROCESSES:
            raise UsageError(
                f"torchrun's {option} is {text[:40]!r}; give a whole number from 1 to "
                f"{_MOST_PROCESSES}"
            )
        return int(text)

    return list(words[place:]), number("--nnodes"), number("--nproc-per-node")


def _typed_command(words: Sequence[str]) -> Command:
    """A command line as typed, with ``cd`` and assignments."""
    words = list(words[words.index("&&") + 1 :] if "&&" in words else words)
    assigned = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        assigned[match[1]] = match[2]
        del words[0]
    return Command(words, str(Path.cwd()), assigned)


def _shell_script(words: Sequence[str]) -> list[str]:
    """A launch script and its arguments, without a leading shell; empty if there is none."""
    words = list(words[1:] if words and Path(words[0]).name in ("bash", "sh") else words)
    return words if words and words[0].endswith(".sh") else []


def _checkout_of(folder: Path) -> Path:
    """The nearest folder, from this one up, with ``pretrain_gpt.py``; otherwise this one."""
    folders = (folder, *folder.parents)
    return next((path for path in folders if (path / "pretrain_gpt.py").is_file()), folder)


def read_launch(
    words: Sequence[str],
    checkout: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Launch:
    """Read the launch that follows ``--`` on the command line.

    Args:
        words: the command, or a launch script with its arguments.
        checkout: MindSpeed-LLM's folder, in which launch scripts are started; by default the
            nearest one from the script's folder up, or that folder.
        environ: environment of launch scripts.

    Raises:
        UsageError: it is not a launch, or the script starts none.
    """
    command = _typed_command(words)
    if script := _shell_script(command.words):
        launch = _from_shell(script, checkout, {**environ, **command.environment})
        launch.environment = {**command.environment, **launch.environment}
        return launch
    launch_read = _launch_of(command)
    if launch_read is None:
        raise UsageError(
            f"the launch {' '.join(words[:6])!r} is none that can be read; give "
            "pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a launch script"
        )
    return launch_read


def _from_shell(words: Sequence[str], checkout: Path | None, environ: Mapping[str, str]) -> Launch:
    file = Path(words[0]).expanduser()
    checkout = checkout or _checkout_of(file.resolve().parent)
    script = next((path for path in (file, checkout / file) if path.is_file()), None)
    if script is None:
        raise UsageError(f"there is no launch script {file} here or in {checkout}")
    captured = capture_commands([str(script.resolve()), *words[1:]], checkout, environ)
    # Scripts may also start Python to prepare data.
    launches = [
        launch
        for command in captured.commands
        if (launch := _launch_of(command)) is not None
        and (launch.processes is not None or Path(launch.script).name.startswith("pretrain"))
    ]
    if not launches:
        called = [" ".join(command.words[:4])[:80] for command in captured.commands]
        *_, last = captured.printed.strip().splitlines() or ["nothing"]
        raise UsageError(
            f"{script} starts no pretraining: it ended with code {captured.code}, started "
            f"{', '.join(called) or 'nothing'}, and printed last: {last[:200]}; set the "
            "variables that it asks for, or give the command line of torchrun"
        )
    launch = launches[0]
    if len(launches) > 1:
        launch.notes.append(
            f"{script.name} starts {len(launches)} trainings; this is about the first"
        )
    return launch
