"""When a measurement has to be over."""

from __future__ import annotations

import time

__all__ = ["Deadline"]

_LONGER = 1.1


class Deadline:
    """Of a measurement that begins now.

    Args:
        minutes: after which nothing begins; what is under way is ended a tenth of them later, so
            that what was found is written while the machine is there.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        start = time.monotonic()
        self._last, self._end = (start + 60 * minutes * times for times in (1.0, _LONGER))

    @property
    def over(self) -> bool:
        """Whether nothing begins any more."""
        return time.monotonic() > self._last

    def limit(self, seconds: float) -> float:
        """For what begins now and may take so many seconds; above 0."""
        return max(1.0, min(seconds, self._end - time.monotonic()))
