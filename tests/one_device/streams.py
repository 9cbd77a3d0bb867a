"""What a device needs for links that are copies: streams and events."""

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
    """Streams by name, made when they are first used."""

    def here(self) -> Event:
        """What the caller's stream was given so far."""

    def give(self, stream: Hashable, after: Sequence[Event], work: Callable[[], None]) -> Event:
        """Give a stream something to do, after what it was given before and these events."""

    def second(self, device: torch.device) -> SecondStream:
        """For the sums and copies of an operation."""

    def synchronise(self) -> None:
        """Let the host wait for all of them."""
