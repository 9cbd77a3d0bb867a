"""Processes that outlive what started them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["MARK", "end", "marked"]

MARK = "COMMFUSE_FAULTS"
"""An environment variable that all processes of one run have, and their children after them."""

_PATIENCE = 3.0


def marked(value: str, *, besides: set[int]) -> dict[int, str]:
    """The living processes whose environment has ``MARK=value``: command lines by process id."""
    wanted = f"{MARK}={value}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in besides:
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (OSError, UnicodeDecodeError):
            continue  # it ended meanwhile, or belongs to somebody else
        if command:  # a zombie has none
            found[int(folder.name)] = command
    return found


def end(value: str, *, besides: set[int]) -> tuple[str, ...]:
    """Give marked processes a moment to end, then kill those that are left and name them."""
    limit = time.monotonic() + _PATIENCE
    while (left := marked(value, besides=besides)) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it was about to end
    return tuple(left.values())
