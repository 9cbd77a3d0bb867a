"""Learns from a launch script what it would start, without starting it.

The script runs in bash with a search path of its own.  ``torchrun``, ``python`` and MindSpore's
``msrun`` are recorders, which write down their arguments and end; a few programs that only read are
the real ones; every other program is a noted no-op.  A Python that is called by its path finds
``PYTHONHOME`` broken and ends at once.  What is left are the shell's own means (assignments,
``source``, ``cd``, redirections) and programs that are called by their paths.
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

_RECORDED = ("torchrun", "msrun", "python", "python3", f"python3.{sys.version_info.minor}")
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
"""Of the shell itself, of this capture, or set anew for every start."""
_BACKGROUND_SECONDS = 2.0
"""What a script leaves in the background has so long to be written down."""
_LONGEST_PRINTED = 1 << 20
# Our own launch scripts have a Python program read their configuration: that one does run.
_OWN_READER = "commfuse_npu.tools.launch_command"
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
    """What would have been started, where, and with which variables that are not the script's."""

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str] = {}


class Captured(NamedTuple):
    """The commands of a script in their order, the first MB that it printed, its exit code."""

    commands: Sequence[Command]
    printed: str
    code: int


def capture_commands(
    script: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    timeout: float = 60.0,
    inside: Sequence[str] = (),
    beside: Path | None = None,
) -> Captured:
    """Run a shell script with recorders in the place of programs.

    Args:
        script: its path and its arguments; it is started in ``folder``.
        environ: its environment, but for the search path.
        timeout: in seconds; then it is killed, with what it has started.
        inside: a program, by its path, with arguments, that starts the shell in a sandbox.
        beside: where files may be written, if not in the usual folder of temporary files.

    Raises:
        UsageError: there is no bash, or the script does not end in time.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("a launch script needs bash, which is not on PATH; give its command line")
    with tempfile.TemporaryDirectory(prefix="commfuse_capture_", dir=beside) as temporary:
        own = Path(temporary)
        records = own / "records"
        records.mkdir()
        environment = {
            **{name: value for name, value in environ.items() if name != "PYTHON"},
            "PATH": str(own / "bin"),
            "BASH_ENV": str(_write_programs(own, records)),
            "PYTHONHOME": str(own / "no-python-is-started"),
        }
        try:
            code = run_bounded(
                [*inside, bash, *script],
                folder=folder,
                environment=environment,
                log=own / "printed",
                seconds=timeout,
                linger=_BACKGROUND_SECONDS,
            )
        except TimeoutError as error:
            raise UsageError(
                f"{script[0]} did not end within {timeout:g} s although it starts nothing here; "
                "give the command line that it runs"
            ) from error
        with (own / "printed").open("rb") as printed:
            text = printed.read(_LONGEST_PRINTED).decode("utf-8", "replace")
        commands = [_command(path, environment) for path in sorted(records.glob("*.json"))]
        return Captured(commands, text, code)


def _command(path: Path, before: Mapping[str, str]) -> Command:
    words, folder, environment = json.loads(path.read_text("utf-8"))
    changed = {
        name: value
        for name, value in environment.items()
        if before.get(name) != value and name not in _NOT_THE_LAUNCHS
    }
    return Command(words, folder, changed)


def _write_programs(folder: Path, records: Path) -> Path:
    """Write the programs into ``bin``, and the functions that bash reads first.

    Functions go before any search path, also one that a sourced file has extended.
    """
    programs, recorder = folder / "bin", folder / "recorder.py"
    programs.mkdir()
    recorder.write_text(_RECORDER, "utf-8")
    # -I: without PYTHONHOME, which is broken on purpose.
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
