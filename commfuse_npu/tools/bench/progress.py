"""A progress bar on the terminal, or a line now and then where there is none."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 24
_LINE_EVERY = 20.0


class Progress:
    """Counts steps of about equal length and guesses how long the rest takes.

    Args:
        total: how many steps there will be.
        limit: seconds that they may take; whoever asks :meth:`late` and :meth:`over` measures less.
        stream: where it is drawn; stderr by default.
    """

    def __init__(self, total: int, limit: float = math.inf, stream: TextIO | None = None) -> None:
        self._total, self._done = max(1, total), 0
        self._limit = limit
        self._stream = stream or sys.stderr
        self._start = self._last_line = time.monotonic()
        self._what = ""
        self._shown = 0

    def say(self, what: str) -> None:
        """What is being done now."""
        self._what = what
        self._draw()

    def step(self, steps: int = 1) -> None:
        """So much more is done."""
        self._done = min(self._total, self._done + steps)
        self._draw()

    def over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() - self._start > self._limit

    def late(self) -> bool:
        """Whether more of the limit has passed than of the steps, and a fifth beside.

        The fifth is for the start, which takes seconds before the first step is done.
        """
        passed = time.monotonic() - self._start
        return passed > self._limit * (0.2 + 0.8 * self._done / self._total)

    def close(self) -> None:
        """Leave the terminal's line."""
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
        self._shown = 0

    def _draw(self) -> None:
        now = time.monotonic()
        passed = now - self._start
        left = passed / self._done * (self._total - self._done) if self._done else math.inf
        # The first steps say little, and more than the limit it will not be.
        left = min(left, max(0.0, self._limit - passed))
        text = f"{self._done}/{self._total} {_clock(passed)}"
        text += f" left {_clock(left)} at most" if left < math.inf else ""
        text += f"  {self._what}"
        if not self._stream.isatty():
            if now - self._last_line >= _LINE_EVERY:
                self._last_line = now
                self._stream.write(text + "\n")
                self._stream.flush()
            return
        filled = _WIDTH * self._done // self._total
        line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {text}"[:119]
        self._stream.write("\r" + line.ljust(self._shown))
        self._stream.flush()
        self._shown = len(line)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
