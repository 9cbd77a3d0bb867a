"""Weight gradients that run where all passes wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["WeightGradients"]


class WeightGradients:
    """A first-in-first-out queue."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], Any]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def compute_one(self) -> None:
        self._queue.popleft()()

    def compute_all(self) -> None:
        while self._queue:
            self.compute_one()

    def discard(self) -> None:
        self._queue.clear()
