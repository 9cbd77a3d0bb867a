"""Determines what a launch script would start, without starting it.

The script runs in bash with its own search path.  ``torchrun`` and ``python`` are recorders that
store their arguments and exit.  A few programs that only read are the real ones, a few that change
files are silent no-ops, and every other one is a no-op that is noted in the output.  A Python
called by its path finds an invalid ``PYTHONHOME`` and exits at once.  What does run are shell
built-ins (assignments, ``source``, ``cd``, redirections) and programs that are called by their
paths.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.bounded import MARK, run_bounded

__all__ = ["Captured", "Command", "capture_commands"]

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


class Command(NamedTuple):
    """A recorded command, its folder, and the variables that the script has set or changed."""

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str] = {}


class Captured(NamedTuple):
    """The commands of a script in order, its output, and its exit code."""

    commands: Sequence[Command]
    printed: str
    code: int


def capture_commands(
    script: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    timeout: float = 60.0,
) -> Captured:
    """Run a shell script with recorders in place of programs.

    Args:
        script: its path and its arguments; it is started in ``folder``.
        environ: its environment, except for the search path.
        timeout: in seconds; after it the script is killed with all that it started.

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
        printed = (scratch / "printed").read_text("utf-8", "replace")
        commands = [_command(path, environment) for path in sorted(records.glob("*.json"))]
        return Captured(commands, printed, code)


def _command(path: Path, before: Mapping[str, str]) -> Command:
    words, folder, environment = json.loads(path.read_text("utf-8"))
    changed = {
        name: value
        for name, value in environment.items()
        if before.get(name) != value and name not in _NOT_THE_LAUNCHS
    }
    return Command(words, folder, changed)


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
