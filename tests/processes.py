"""Helpers to start processes, interrupt them and wait for their end."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.limits import LIMIT


def interruptible(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command that Ctrl-C ends, even if the tests run in a job that ignores SIGINT."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(
        words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options
    )


def kill_workers(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, and only these."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown()


def ended(pid: int) -> bool:
    """Whether a process has ended; a zombie, which only waits for its parent, counts."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until the condition is true, for at most ``LIMIT`` seconds."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
