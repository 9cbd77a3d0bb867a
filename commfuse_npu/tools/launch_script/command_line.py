"""A launch as data, read from a command line.

Supported are ``pretrain_gpt.py ARGS`` and ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``).  Each may have ``-m mindspeed_patches.launch``
before the script.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.option_words import Options

NODES = "--nnodes"
PER_NODE = "--nproc-per-node"
_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_OF_THE_MACHINE = ("", "0", "auto", "cpu", "gpu", "npu", "xpu")
"""Numbers of processes that torchrun or a script finds out where it runs."""


@dataclass
class Launch:
    """A script with its options, and where it is started.

    Attributes:
        nodes, per_node: number of nodes, and of processes on each; ``None`` without torchrun, 0
            if it is unknown.
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

    def located(self, checkout: Path) -> tuple[Path, Path]:
        """The base of relative paths, the launch's folder or MindSpeed-LLM's, and the script in it.

        Raises:
            UsageError: the script is in neither.
        """
        for folder in (self.folder, checkout):
            if (folder / self.script).is_file():
                return folder, (folder / self.script).resolve()
        raise UsageError(
            f"there is no {self.script} in {self.folder} or in {checkout}; give its path"
        )


def launch_of(words: Sequence[str], folder: str, environment: Mapping[str, str]) -> Launch | None:
    """Parse a command that is started in a folder; ``None`` if it is not a launch."""
    torchrun, registers, script, arguments = _parts(words)
    if not script.endswith(".py"):
        return None
    nodes = None if torchrun is None else _number(torchrun, NODES)
    per_node = None if torchrun is None else _number(torchrun, PER_NODE)
    options = Options(arguments)
    variables = dict(environment)
    return Launch(script, options, nodes, per_node, Path(folder), variables, registers=registers)


def starts_training(words: Sequence[str]) -> bool:
    """Whether a command is a launch, and not of Python to prepare data, or an inference."""
    torchrun, _, script, _ = _parts(words)
    if not script.endswith(".py") or starts_inference(words):
        return False
    return torchrun is not None or Path(script).name.startswith("pretrain")


def starts_inference(words: Sequence[str]) -> bool:
    """Whether a command starts a script of MindSpeed-LLM that trains nothing."""
    _, _, script, _ = _parts(words)
    return Path(script).name in ("inference.py", "evaluation.py")


def values(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of a launch's options, with torchrun's sizes and the script, as they are given."""
    torchrun, _, script, arguments = _parts(words)
    options = Options([f"--script={script}", *arguments])
    sizes = {} if torchrun is None else {name: torchrun.values(name) for name in (NODES, PER_NODE)}
    return sizes | {name: options.values(name) for name in options.names}


def _parts(words: Sequence[str]) -> tuple[Options | None, bool, str, list[str]]:
    """torchrun's own options, whether CommFuse is registered, the script and its arguments."""
    rest = list(words)
    if rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        del rest[0]
        while rest and re.fullmatch(r"-[uBOsSEI]+", rest[0]):
            del rest[0]
    by_module = rest[:1] == ["-m"] and rest[1:2] and rest[1] in _TORCHRUN_MODULES
    torchrun = None
    if by_module or (rest and Path(rest[0]).name == "torchrun"):
        del rest[: 2 if by_module else 1]
        at = next((i for i, w in enumerate(rest) if w == "-m" or w.endswith(".py")), len(rest))
        own = (w.replace("_", "-") if w.startswith("--") else w for w in rest[:at])
        torchrun = Options(["--torchrun", *own])  # short options, as -t 3, may come first
        del rest[:at]
    registers = rest[:2] == ["-m", _LAUNCH_MODULE]
    script, *arguments = rest[2 if registers else 0 :] or [""]
    return torchrun, registers, script, arguments


def _number(torchrun: Options, name: str) -> int:
    """The value of one of torchrun's sizes; 0 if it is empty or depends on the machine."""
    if name not in torchrun:
        return 1
    word = (torchrun.values(name) or [""])[0]
    return 0 if word in _OF_THE_MACHINE else Options([name, word]).number(name, 1)
