"""A launch as data: a script, its options, and how many processes it wants.

Understood are ``pretrain_gpt.py ARGS``, ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``), each also with ``-m mindspeed_patches.launch``
before the script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.options import value_of
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.shell import Command

__all__ = ["Launch", "launch_of"]

_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


@dataclass
class Launch:
    """What a launch asks for.

    Attributes:
        script: as it was named.
        options: of the script.
        nodes, per_node: how many, and processes on each; ``None`` if the launch does not say.
        folder: where it was started.
        environment: variables that a launch script sets.
        notes: what a reader should know of how it was read.
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
        """Over all nodes."""
        return self.nodes * self.per_node if self.nodes and self.per_node else None

    def script_path(self, checkout: Path) -> Path:
        """The script, in the launch's folder or in MindSpeed-LLM's.

        Raises:
            UsageError: it is in neither.
        """
        for folder in (self.folder, checkout):
            if (folder / self.script).is_file():
                return (folder / self.script).resolve()
        raise UsageError(
            f"there is no {self.script} in {self.folder} or in {checkout}; give its path"
        )


def launch_of(command: Command) -> Launch | None:
    """A launch, if the command is one."""
    if not command.words:
        return None
    words = list(command.words)
    program = Path(words[0]).name
    nodes = per_node = None
    if program == "torchrun":
        words, nodes, per_node = _torchrun(words[1:])
    elif re.fullmatch(r"python[\d.]*", program):
        words = words[1:]
        while words and re.fullmatch(r"-[uBOsSEI]+", words[0]):
            words.pop(0)
        if len(words) > 1 and words[0] == "-m" and words[1] in _TORCHRUN_MODULES:
            words, nodes, per_node = _torchrun(words[2:])
    registers = words[:2] == ["-m", _LAUNCH_MODULE]
    if registers:
        words = words[2:]
    if not words or not words[0].endswith(".py"):
        return None
    return Launch(
        words[0],
        Options(words[1:]),
        nodes,
        per_node,
        Path(command.folder),
        dict(command.environment),
        registers=registers,
    )


def _torchrun(words: Sequence[str]) -> tuple[list[str], int | None, int | None]:
    """The words after torchrun's own options, the number of nodes and of processes on each."""
    place = next((i for i, w in enumerate(words) if w == "-m" or w.endswith(".py")), len(words))
    own = [word.replace("_", "-") if word.startswith("--") else word for word in words[:place]]

    def number(option: str) -> int | None:
        # A range of nodes ends with the most.
        text = (value_of(own, option) or "1").rpartition(":")[2]
        return int(text) if text.isdecimal() else None

    return list(words[place:]), number("--nnodes"), number("--nproc-per-node")
