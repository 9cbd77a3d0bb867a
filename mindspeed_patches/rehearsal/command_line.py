"""A launch as data: a script, its options, and how many processes it wants.

Understood are ``pretrain_gpt.py ARGS``, ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``), each also with ``-m mindspeed_patches.launch``
before the script, and shell scripts that end in one of these.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_patches.rehearsal import UsageError
from mindspeed_patches.rehearsal.shell_launch import Command, capture_commands

__all__ = ["Launch", "Options", "read_launch"]

_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ADDRESSES = ("--master-addr", "--master-port", "--node-rank", "--local-addr")


class Options:
    """The options of a script in their order, and a note of every change to them.

    An option is a word that begins with ``--``; what follows up to the next one are its values.
    Without a parser for the script's options that is all that can be known, and it is how
    MindSpeed-LLM reads them early itself.

    Attributes:
        changes: a line per change, ``--option old -> new``.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.changes: list[str] = []
        self._items: list[tuple[str, list[str]]] = []
        for word in words:
            if word.startswith("--"):
                name, has_value, value = word.partition("=")
                self._items.append((name, [value] if has_value else []))
            elif self._items:
                self._items[-1][1].append(word)
            else:
                raise UsageError(
                    f"the script's arguments begin with {word!r} where an option is expected"
                )

    def __contains__(self, name: str) -> bool:
        return any(name == given for given, _ in self._items)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._items]

    @property
    def words(self) -> list[str]:
        return [word for name, values in self._items for word in (name, *values)]

    def values(self, name: str) -> list[str]:
        """The values of an option; of the last one if it is repeated, as in argparse."""
        return next((list(values) for given, values in reversed(self._items) if given == name), [])

    def text(self, name: str) -> str | None:
        """The values as one text; ``None`` if the option is not there or has none."""
        return " ".join(self.values(name)) or None

    def number(self, name: str, default: int) -> int:
        """The value as a whole number.

        Raises:
            UsageError: it is none.
        """
        text = self.text(name)
        try:
            return default if text is None else int(text)
        except ValueError as error:
            raise UsageError(f"{name} is {text!r}; it has to be a whole number") from error

    def set(self, name: str, *values: object, why: str = "") -> None:
        """Give an option these values, where it stands or at the end, and note the change."""
        new = [str(value) for value in values]
        if name in self and self.values(name) == new:
            return
        old = " ".join(self.values(name)) if name in self else "(not given)"
        self._note(name, old, " ".join(new) or "given", why)
        self._remove(name, keep=1)
        self._items = [(n, new if n == name else v) for n, v in self._items]
        if name not in self:
            self._items.append((name, new))

    def drop(self, *names: str, why: str = "") -> None:
        """Take options away, and note those that were there."""
        for name in names:
            if name in self:
                self._note(name, " ".join(self.values(name)), "(dropped)", why)
                self._remove(name)

    def copy(self) -> Options:
        """The same options, with no changes noted."""
        return Options(self.words)

    def _note(self, name: str, old: str, new: str, why: str) -> None:
        self.changes.append(
            " ".join(filter(None, (name, old, "->", new))) + (f"   ({why})" if why else "")
        )

    def _remove(self, name: str, keep: int = 0) -> None:
        places = [place for place, (given, _) in enumerate(self._items) if given == name]
        removed = set(places[keep:])
        self._items = [item for place, item in enumerate(self._items) if place not in removed]


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


def read_launch(
    words: Sequence[str], checkout: Path, environ: Mapping[str, str] = os.environ
) -> Launch:
    """Understand what follows ``--``.

    Args:
        words: the command.
        checkout: MindSpeed-LLM's folder, from which launch scripts are started.
        environ: for launch scripts.

    Raises:
        UsageError: nothing that can be rehearsed.
    """
    words = list(words)
    if words and Path(words[0]).name in ("bash", "sh"):
        words = words[1:]
    if words and words[0].endswith(".sh"):
        return _from_shell(words, checkout, environ)
    launch = _from_command(Command(words, str(Path.cwd())))
    if launch is None:
        raise UsageError(
            f"the launch {' '.join(words[:6])!r} is none that can be rehearsed; give "
            "pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a launch script"
        )
    return launch


def _from_shell(words: Sequence[str], checkout: Path, environ: Mapping[str, str]) -> Launch:
    given = Path(words[0]).expanduser()
    script = next((path for path in (given, checkout / given) if path.is_file()), None)
    if script is None:
        raise UsageError(f"there is no launch script {given} here or in {checkout}")
    commands, output = capture_commands([str(script.resolve()), *words[1:]], checkout, environ)
    # Scripts also start Python to prepare data.
    launches = [
        launch
        for command in commands
        if (launch := _from_command(command)) is not None
        and (launch.processes is not None or Path(launch.script).name.startswith("pretrain"))
    ]
    if not launches:
        called = [" ".join(command.words[:12]) for command in commands]
        raise UsageError(
            f"{script} starts no pretraining with torchrun or python found by their names.\n"
            f"What it started: {'; '.join(called) or '(nothing)'}\n"
            f"What it printed: {output.strip() or '(nothing)'}"
        )
    launch = launches[0]
    if len(launches) > 1:
        launch.notes.append(
            f"{script.name} starts {len(launches)} trainings; this is about the first"
        )
    return launch


def _from_command(command: Command) -> Launch | None:
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
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")  # of torch's older launcher
    parser.exit_on_error = False
    try:
        given = parser.parse_args(_without_addresses(words))
    except (argparse.ArgumentError, SystemExit) as error:
        raise UsageError(f"torchrun does not take {' '.join(words[:8])!r}: {error}") from error
    script = [given.training_script, *given.training_script_args]
    if given.module:
        script = ["-m", *script]
    nodes = str(given.nnodes).rpartition(":")[2]
    per_node = str(given.nproc_per_node)
    if not (nodes.isdigit() and per_node.isdigit()):
        return script, None
    return script, int(nodes) * int(per_node)
