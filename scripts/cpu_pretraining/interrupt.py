"""Ctrl-C and SIGTERM as a request to stop after the running iteration, agreed on by all ranks.

A signal reaches the ranks at different moments, or only one of them. A rank that left by itself
would leave the others in a collective, so each one only remembers the signal and the ranks decide
together, once per iteration.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "exit_code", "listen_for_stop"]


class StopRequest:
    """The signal that this process received, 0 if none yet."""

    def __init__(self) -> None:
        self.signal_number = 0

    def remember(self, number: int, frame: FrameType | None) -> None:
        """Signal handler; the first signal counts, a repeated Ctrl-C changes nothing."""
        self.signal_number = self.signal_number or number


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Install the handlers for SIGINT and SIGTERM; restore the previous ones at the end."""
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, request.remember) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def exit_code(signal_number: int) -> int:
    """Exit code of a process stopped by a signal, as shells spell it: 130 for SIGINT."""
    return 128 + signal_number
