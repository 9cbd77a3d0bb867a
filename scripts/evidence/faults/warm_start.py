"""Ranks for one scenario after the other, from an interpreter that has torch imported already.

Run as a process of its own, with ``python -m``, it takes from its standard input a scenario, a
folder for what its ranks write (``rank-R.txt`` gets the output of one) and the seconds after which
those that are left are killed, and forks a process per rank.  A rank returns to the end of the
program or raises through it, so that it ends as any Python program does: with its traceback, its
exit code, and whatever torch does at the end of an interpreter.  Importing torch takes longer than
most scenarios.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import time
from pathlib import Path

from scripts.evidence.faults.rank import run

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Serve until the input ends.  A forked rank comes back from here too."""
    replies = os.fdopen(os.dup(1), "wb")
    # At its end a rank would look through all that was imported, and copy its pages for that.
    gc.freeze()
    while True:
        try:
            scenario, folder, limit = pickle.load(sys.stdin.buffer)
        except EOFError:
            return 0
        pids: dict[int, int] = {}
        for rank in range(scenario.ranks):
            pid = os.fork()
            if pid == 0:
                _become(folder / f"rank-{rank}.txt")
                run(scenario, rank, folder)
                return 0
            pids[pid] = rank
        pickle.dump(_ended(pids, limit), replies)
        replies.flush()


def _become(output: Path) -> None:
    """Let go of the parent's pipes, and end with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _ended(pids: dict[int, int], limit: float) -> list[int | None]:
    """The ranks' exit codes, by rank: negative for a signal, none for one that did not end."""
    ended: dict[int, int | None] = {}
    end = time.monotonic() + limit
    while len(ended) < len(pids):
        late = time.monotonic() > end
        for pid, rank in pids.items():
            if rank in ended:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if done:
                ended[rank] = None if late else os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [ended[rank] for rank in sorted(ended)]


if __name__ == "__main__":
    sys.exit(main())
