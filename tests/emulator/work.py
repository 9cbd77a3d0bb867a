"""The handle of an operation, or of a whole batch.

On the device ``wait()`` holds the stream, not the host, and a host that reads too early gets
whatever is in memory.  CPU tensors have no stream, so this ``wait()`` holds the host; the rest is
kept: a receive buffer is poisoned at the post and filled by the wait, and a send buffer is read as
late as its transfer allows.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tests.emulator.link import Link
from tests.emulator.messages import Data


class HcclWork(dist.Work):
    """One operation of one rank.

    Args:
        finish: puts what was received where it belongs.
        forget: called at the wait.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        seconds: float,
        finish: Callable[[Data], None],
        forget: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._link = link
        self._number = number
        self._seconds = seconds
        self._finish: Callable[[Data], None] | None = finish
        self._forget = forget

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the operation take place; a second call returns at once."""
        if self._finish is None:
            return True
        finish, self._finish = self._finish, None
        self._forget(self._number)
        seconds = timeout.total_seconds() if timeout else 0.0
        finish(self._link.wait(self._number, seconds if seconds > 0 else self._seconds))
        return True

    def is_completed(self) -> bool:
        """Whether it took place; what was received is still to be waited for."""
        return self._finish is None or self._link.is_complete(self._number)

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()


class SeveralWorks(dist.Work):
    """Collectives that were asked for together and run one after the other."""

    def __init__(self, works: list[HcclWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
