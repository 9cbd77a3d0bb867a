"""What a device needs for links that are copies: streams and events, real or of threads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from commfuse_npu.runtime.second_stream import SecondStream

__all__ = ["Event", "Streams"]


class Event(Protocol):
    """A point of a stream."""

    def wait(self) -> None:
        """What the caller's stream is given from now on comes after it."""


class Streams(Protocol):
    """Streams by name, made when they are first used.

    Attributes:
        delay: seconds that the next thing on the second stream of an operation is late.
    """

    delay: Callable[[], float]

    def here(self) -> Event:
        """What the caller's stream was given so far."""

    def give(
        self,
        stream: Hashable,
        after: Sequence[Event],
        seconds: float,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> Event:
        """Give a stream something to do; what it was given before comes first.

        Args:
            after: what else has to be over before.
            seconds: how long it takes at least, from when nothing holds it any more.
            begin, end: called at the start of that time and at its end.
        """

    def second(self, device: torch.device) -> SecondStream:
        """For the sums and copies of an operation."""

    def synchronise(self) -> None:
        """Let the host wait for all of them.

        Raises:
            RuntimeError: something went wrong on one, since the last time; it did nothing after it.
        """
