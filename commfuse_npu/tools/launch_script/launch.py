"""A launch as data: a script, its options, and how many processes it wants.

Understood are ``pretrain_gpt.py ARGS``, ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``), each also with ``-m mindspeed_patches.launch``
before the script.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.shell import Command

__all__ = ["Launch", "launch_of"]

_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ADDRESSES = ("--master-addr", "--master-port", "--node-rank", "--local-addr")
_FLAGS = ("standalone", "no-python", "run-path", "use-env", "virtual-local-rank")
_SHORT = {"redirects": "-r", "tee": "-t"}
_WITH_VALUE = (
    *("nnodes", "nproc-per-node", "max-restarts", "monitor-interval", "start-method", "role"),
    *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "event-log-handler", "log-dir"),
    *("logs-specs", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters"),
    *("numa-binding", "signals-to-handle", "shutdown-timeout", *_SHORT),
)


@dataclass
class Launch:
    """What a launch asks for.

    Attributes:
        script: as it was named.
        options: of the script.
        processes: over all nodes; ``None`` if the launch does not say.
        folder: where it was started.
        environment: variables that a launch script sets.
        notes: what a reader should know of how it was read.
    """

    script: str
    options: Options
    processes: int | None
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
    processes: int | None = None
    if program == "torchrun":
        words, processes = _torchrun(words[1:])
    elif re.fullmatch(r"python[\d.]*", program):
        words = words[1:]
        while words and re.fullmatch(r"-[uBOsSEI]+", words[0]):
            words.pop(0)
        if len(words) > 1 and words[0] == "-m" and words[1] in _TORCHRUN_MODULES:
            words, processes = _torchrun(words[2:])
    if words[:2] == ["-m", _LAUNCH_MODULE]:
        words = words[2:]
    if not words or not words[0].endswith(".py"):
        return None
    return Launch(
        words[0],
        Options(words[1:]),
        processes,
        Path(command.folder),
        dict(command.environment),
    )


def _without_addresses(words: Sequence[str]) -> list[str]:
    """Leave out where the nodes meet: examples have ``your master node IP`` there, unquoted."""
    kept: list[str] = []
    dropping = False
    for place, word in enumerate(words):
        if word == "-m" or word.endswith(".py"):
            return [*kept, *words[place:]]
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            dropping = name in _ADDRESSES
        if not dropping:
            kept.append(word)
    return kept


def _torchrun(words: Sequence[str]) -> tuple[list[str], int | None]:
    """What torchrun would start, and how many of it."""
    given = _torchrun_parser().parse_args(_without_addresses(words))
    script = [given.training_script, *given.training_script_args]
    if given.module:
        script = ["-m", *script]
    nodes = str(given.nnodes).rpartition(":")[2]
    per_node = str(given.nproc_per_node)
    if not (nodes.isdigit() and per_node.isdigit()):
        return script, None
    return script, int(nodes) * int(per_node)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun does not take these options: {message}; correct them")


def _torchrun_parser() -> argparse.ArgumentParser:
    """torchrun's options (torch 2.7 and 2.13 and the older launcher, read), without torch."""
    parser = _Parser(add_help=False)
    parser.add_argument("-m", "--module", action="store_true")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", action="store_true")
    for name in _WITH_VALUE:
        short = [_SHORT[name]] if name in _SHORT else []
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", *short)
    parser.set_defaults(nnodes="1", nproc_per_node="1")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser
