"""Learns from a launch script what it would start, without starting it.

The script runs in bash with a search path of its own.  ``torchrun`` and ``python`` are recorders,
which write down their arguments and end; a few programs that only read are the real ones; every
other program is a noted no-op.  A Python that is called by its path finds ``PYTHONHOME`` broken
and ends at once.  What is left are the shell's own means: assignments, ``source``, ``cd``,
redirections.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_patches.rehearsal import UsageError

__all__ = ["Command", "capture_commands"]

_RECORDED = ("torchrun", "python", "python3", f"python3.{sys.version_info.minor}")
_READING = (
    *(
        "bash",
        "sh",
        "env",
        "cat",
        "date",
        "dirname",
        "basename",
        "readlink",
        "realpath",
        "hostname",
    ),
    *("nproc", "wc", "sed", "awk", "grep", "cut", "tr", "head", "tail", "seq", "sort", "uniq"),
    *("expr", "uname", "id", "ls"),
)
_SKIPPED = ("mkdir", "rm", "cp", "mv", "ln", "touch", "chmod", "sleep")
# Of the shell itself, of this capture, or set anew for a rehearsal.
_NOT_THE_LAUNCHS = {
    *("BASH_ENV", "PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONHOME", "PYTHONPATH"),
    *("LD_LIBRARY_PATH", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
}
# Our own launch scripts have a Python program read their configuration: that one does run.
_OWN_READER = "commfuse_npu.tools.model_config"
_RECORDER = """\
import json, os, sys, time
reader, folder, *words = sys.argv[1:]
if words[1:3] == ["-m", reader]:
    os.environ.pop("PYTHONHOME")
    os.execv(sys.executable, [sys.executable, *words[1:]])
name = os.path.join(folder, f"{time.time_ns():020d}.json")
with open(name, "w", encoding="utf-8") as file:
    json.dump({"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}, file)
"""


@dataclass(frozen=True)
class Command:
    """What would have been started.

    Attributes:
        words: program and arguments.
        folder: the working directory.
        environment: variables that differ from those before the script.
    """

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)


def capture_commands(
    script: Sequence[str], folder: Path, environ: Mapping[str, str], timeout: float = 60.0
) -> tuple[list[Command], str]:
    """Run a shell script with recorders in the place of programs.

    Args:
        script: its path and its arguments.
        folder: where it is started.
        environ: its environment, but for the search path.
        timeout: in seconds.

    Returns:
        the recorded commands in their order, and what the script printed.

    Raises:
        UsageError: there is no bash, or the script does not end in time.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("a launch script needs bash, which is not on PATH; give its command line")
    with tempfile.TemporaryDirectory(prefix="commfuse_capture_") as temporary:
        programs, records = Path(temporary, "bin"), Path(temporary, "records")
        records.mkdir()
        _write_programs(programs, records)
        environment = {
            **{name: value for name, value in environ.items() if name != "PYTHON"},
            "PATH": str(programs),
            "BASH_ENV": str(_write_functions(Path(temporary), programs)),
            "PYTHONHOME": str(Path(temporary, "no-python-is-started")),
        }
        try:
            done = subprocess.run(
                [bash, *script],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"{script[0]} did not end within {timeout:.0f} s although it starts nothing here; "
                "give the command line that it runs"
            ) from error
        commands = [_command(path, environment) for path in sorted(records.glob("*.json"))]
        return commands, done.stdout


def _command(path: Path, before: Mapping[str, str]) -> Command:
    record = json.loads(path.read_text("utf-8"))
    changed = {
        name: value
        for name, value in record["environment"].items()
        if before.get(name) != value and name not in _NOT_THE_LAUNCHS
    }
    return Command(record["words"], record["folder"], changed)


def _write_programs(programs: Path, records: Path) -> None:
    programs.mkdir()
    recorder = programs.parent / "recorder.py"
    recorder.write_text(_RECORDER, "utf-8")
    # -I: without PYTHONHOME, which is broken on purpose.
    command = [sys.executable, "-I", "-S", str(recorder), _OWN_READER, str(records)]
    record = shlex.join(command)
    for name in _RECORDED:
        _write_program(programs / name, f'exec {record} {name} "$@"')
    for name in _SKIPPED:
        _write_program(programs / name, ":")
    _write_program(programs / "tee", "exec cat")
    for name in _READING:
        if (real := shutil.which(name)) is not None:
            os.symlink(os.path.abspath(real), programs / name)


def _write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", "utf-8")
    path.chmod(0o755)


def _write_functions(folder: Path, programs: Path) -> Path:
    """Functions go before any search path, also one that a sourced file has extended."""
    lines = [f'{name}() {{ {shlex.quote(str(programs / name))} "$@"; }}' for name in _RECORDED]
    lines.append('command_not_found_handle() { echo "not run: $*" >&2; }')
    path = folder / "functions.sh"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
