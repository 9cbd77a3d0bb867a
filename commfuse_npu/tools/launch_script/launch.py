"""A launch as data: read from a command line as typed, or from what a script would start.

Supported are ``pretrain_gpt.py ARGS`` and ``torchrun ... pretrain_gpt.py ARGS`` (also as
``python -m torch.distributed.run`` or ``.launch``).  Each may have ``-m mindspeed_patches.launch``
before the script, and ``cd FOLDER &&`` and assignments before it.

A launch script runs in bash with its own search path.  ``torchrun`` and ``python`` are recorders
that store their arguments and exit.  A few programs that only read are the real ones, a few that
change files are silent no-ops, and every other one is a no-op that is noted in the output.  A
Python called by its path finds an invalid ``PYTHONHOME`` and exits at once.  What does run are
shell built-ins (assignments, ``source``, ``cd``, redirections) and programs that are called by
their paths.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.short_run import MARK, run_bounded

_LAUNCH_MODULE = "mindspeed_patches.launch"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
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


def _launch_of(words: Sequence[str], folder: str, environment: Mapping[str, str]) -> Launch | None:
    """Parse a command that is started in a folder; ``None`` if it is not a launch."""
    words = list(words)
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
    options, variables = Options(arguments), dict(environment)
    return Launch(script, options, nodes, per_node, Path(folder), variables, registers=registers)


def _torchrun(words: Sequence[str]) -> tuple[list[str], int, int]:
    """The words after torchrun's own options, the number of nodes and of processes on each."""
    place = next((i for i, w in enumerate(words) if w == "-m" or w.endswith(".py")), len(words))
    own = (w.replace("_", "-") if w.startswith("--") else w for w in words[:place])
    options = Options(["--torchrun", *own])  # short options, as -t 3, may come first

    def number(option: str) -> int:
        return Options([option, *(options.values(option) or ["1"])[:1]]).number(option, 1)

    return list(words[place:]), number("--nnodes"), number("--nproc-per-node")


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
    typed = list(words[words.index("&&") + 1 :] if "&&" in words else words)
    assigned = {}
    while typed and (match := _ASSIGNMENT.fullmatch(typed[0])):
        assigned[match[1]] = match[2]
        del typed[0]
    script = typed[1:] if typed and Path(typed[0]).name in ("bash", "sh") else typed
    if script and script[0].endswith(".sh"):
        launch = _from_shell(script, checkout, {**environ, **assigned})
        launch.environment = {**assigned, **launch.environment}
        return launch
    if read := _launch_of(typed, str(Path.cwd()), assigned):
        return read
    raise UsageError(
        f"the launch {' '.join(words[:6])!r} is none that can be read; give "
        "pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a launch script"
    )


def _from_shell(words: Sequence[str], checkout: Path | None, environ: Mapping[str, str]) -> Launch:
    file = Path(words[0]).expanduser()
    checkout = checkout or _checkout_of(file.resolve().parent)
    script = next((path for path in (file, checkout / file) if path.is_file()), None)
    if script is None:
        raise UsageError(f"there is no launch script {file} here or in {checkout}")
    commands, printed, code = capture_commands(
        [str(script.resolve()), *words[1:]], checkout, environ
    )
    # Scripts may also start Python to prepare data.
    launches = [
        launch
        for command in commands
        if (launch := _launch_of(*command)) is not None
        and (launch.processes is not None or Path(launch.script).name.startswith("pretrain"))
    ]
    if not launches:
        called = [" ".join(words[:4])[:80] for words, *_ in commands]
        *_, last = printed.strip().splitlines() or ["nothing"]
        raise UsageError(
            f"{script} starts no pretraining: it ended with code {code}, started "
            f"{', '.join(called) or 'nothing'}, and printed last: {last[:200]}; set the "
            "variables that it asks for, or give the command line of torchrun"
        )
    launch = launches[0]
    if len(launches) > 1:
        launch.notes.append(
            f"{script.name} starts {len(launches)} trainings; this is about the first"
        )
    return launch


# ------------------------------------------------------------------ what a script would start

_RECORDED = ("torchrun", "python", "python3", f"python3.{sys.version_info.minor}")
_READING = (
    *("bash", "sh", "env", "cat", "date", "dirname", "basename", "readlink", "realpath"),
    *("hostname", "nproc", "wc", "sed", "awk", "grep", "cut", "tr", "head", "tail", "seq"),
    *("sort", "uniq", "expr", "uname", "id", "ls"),
)
_SKIPPED = ("mkdir", "rm", "cp", "mv", "ln", "touch", "chmod", "sleep")
_NOT_THE_LAUNCHS = {
    *("BASH_ENV", "PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONHOME", MARK),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
}
"""Variables of the shell itself, of this capture, or specific to a single start."""
_BACKGROUND_SECONDS = 2.0
"""Seconds for background processes of a script to be recorded."""
# Our own launch scripts run a Python program that reads the configuration: it is not replaced.
_OWN_READER = "commfuse_npu.tools.model_config"
_RECORDER = """\
import json, os, sys, time
reader, folder, *words = sys.argv[1:]
if words[1:3] == ["-m", reader]:
    os.environ.pop("PYTHONHOME")
    os.execv(sys.executable, [sys.executable, *words[1:]])
name = os.path.join(folder, f"{time.time_ns():020d}.json")
with open(name + ".part", "w", encoding="utf-8") as file:
    json.dump([words, os.getcwd(), dict(os.environ)], file)
os.replace(name + ".part", name)
"""


_Command = tuple[list[str], str, dict[str, str]]
"""The words of a command, the folder, and the variables that the script had changed."""


def capture_commands(
    script: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    timeout: float = 60.0,
) -> tuple[list[_Command], str, int]:
    """Run a shell script with recorders in place of programs.

    Args:
        script: its path and its arguments; it is started in ``folder``.
        environ: its environment, except for the search path.
        timeout: in seconds; after it the script is killed with all that it started.

    Returns:
        What it started, in order; what it printed; its exit code.

    Raises:
        UsageError: there is no bash, or the script does not end in time.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("a launch script needs bash, which is not on PATH; give its command line")
    with tempfile.TemporaryDirectory(prefix="commfuse_capture_") as temporary:
        scratch = Path(temporary)
        records = scratch / "records"
        records.mkdir()
        environment = {
            **{name: value for name, value in environ.items() if name != "PYTHON"},
            "PATH": str(scratch / "bin"),
            "BASH_ENV": str(_write_programs(scratch, records)),
            "PYTHONHOME": str(scratch / "no-python-is-started"),
        }
        try:
            code = run_bounded(
                [bash, *script],
                folder=folder,
                environment=environment,
                log=scratch / "printed",
                seconds=timeout,
                linger=_BACKGROUND_SECONDS,
            )
        except TimeoutError as error:
            raise UsageError(
                f"{script[0]} did not end within {timeout:g} s although it starts nothing here; "
                "give the command line that it runs"
            ) from error
        commands = []
        for path in sorted(records.glob("*.json")):
            words, started_in, variables = json.loads(path.read_text("utf-8"))
            changed = {
                name: value
                for name, value in variables.items()
                if environment.get(name) != value and name not in _NOT_THE_LAUNCHS
            }
            commands.append((words, started_in, changed))
        return commands, (scratch / "printed").read_text("utf-8", "replace"), code


def _write_programs(folder: Path, records: Path) -> Path:
    """Write the programs into ``bin``, and the shell functions that bash reads first.

    Functions take precedence over any search path, including one that a sourced file extends.
    """
    programs, recorder = folder / "bin", folder / "recorder.py"
    programs.mkdir()
    recorder.write_text(_RECORDER, "utf-8")
    # -I ignores PYTHONHOME, which is invalid on purpose.
    record = shlex.join([sys.executable, "-I", "-S", str(recorder), _OWN_READER, str(records)])
    written = {name: f'exec {record} {name} "$@"' for name in _RECORDED}
    written |= {**dict.fromkeys(_SKIPPED, ":"), "tee": "exec cat"}
    functions = ['command_not_found_handle() { echo "not run: $*" >&2; }']
    for name, line in written.items():
        path = programs / name
        path.write_text(f"#!/bin/sh\n{line}\n", "utf-8")
        path.chmod(0o755)
        functions.append(f'{name}() {{ {shlex.quote(str(path))} "$@"; }}')
    for name in _READING:
        if (real := shutil.which(name)) is not None:
            os.symlink(os.path.abspath(real), programs / name)
    read_first = folder / "functions.sh"
    read_first.write_text("\n".join(functions) + "\n", "utf-8")
    return read_first
