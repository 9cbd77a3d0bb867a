"""Runs a launch within a time limit, with its output in a file, and ends all its processes.

torchrun makes every rank a session leader, with its data loaders in the session, so no process
group has them all.  They are identified by an environment variable (Linux).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from commfuse_npu.runtime.child_process import die_with_parent

__all__ = ["MARK", "last_lines", "run_bounded"]

MARK = "COMMFUSE_STARTED_BY"
"""The environment variable of all processes that a command started."""

_GRACE = 20.0
"""Seconds from SIGTERM to SIGKILL, and then the longest wait for the processes to end."""


def run_bounded(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
    linger: float = 0.0,
) -> int:
    """Run a command in a folder, with its output in ``log``; returns its exit code.

    Args:
        seconds: time limit.
        linger: seconds that other processes of its group have to end after it; then they are ended.

    Raises:
        TimeoutError: it exceeded the time limit and was ended.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    with log.open("w", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(seconds)
            end = time.monotonic() + linger
            while time.monotonic() < end and _signal_group(process.pid, 0):
                time.sleep(0.01)
            return code
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not end within {seconds:.0f} s") from error
        finally:
            # No process outlives the command, not even after an error or Ctrl-C.
            _end(process, mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    if process.poll() is None:
        # torchrun forwards the signal to its ranks.
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    # A device is free only once the processes that used it have gone.
    end = time.monotonic() + _GRACE
    while (pids := list(_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal; whether the group still had a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _marked(mark: str) -> Iterator[int]:
    """Processes that a command started, directly or indirectly."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


# C++ stacks, lists of all kernels of an operator, and messages that follow a rank's failure.
_NOISE = re.compile(r"frame #|registered at |\[ERROR\] .* ERR\d+|[WEI]\d{4} .*elastic")


def last_lines(log: Path) -> list[str]:
    """The last 30 lines of a log: the traceback of the first failed rank, if there is one."""
    text = log.read_text("utf-8", errors="replace").splitlines()
    text = [line for line in text if line.strip() and not _NOISE.search(line)]
    own = next((i for i, line in enumerate(text) if "torch/distributed/run.py" in line), len(text))
    starts = [i for i, line in enumerate(text[:own]) if "Traceback (most recent call last)" in line]
    if own < len(text) and starts:
        own = starts.pop()  # torchrun's own traceback says nothing that the ranks did not
    text = text[starts[0] if starts else 0 : own]
    # torch prefixes the lines of a rank's traceback; those of several ranks are interleaved.
    mark = re.match(r"\[rank\d+\]: ", text[0]) if text else None
    if mark is not None:
        text = [line.removeprefix(mark[0]) for line in text if line.startswith(mark[0])]
    return text[-30:]
