"""Processes that tests start, interrupt, and want to see gone."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.limits import LIMIT


def interruptible(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A command that Ctrl-C ends: who runs the tests in the background may have it ignored."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def ended(pid: int) -> bool:
    """Whether it has gone, as a zombie has, too, which waits for its parent only."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
