"""What the launcher asks of the process that forks the ranks, and what that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.faults.scenario import Scenario

__all__ = ["Ended", "Order"]


@dataclass(frozen=True)
class Order:
    """A scenario to play.

    Attributes:
        folder: for what the ranks write; ``rank-R.txt`` gets their output.
        limit: seconds after which ranks that are left are killed.
    """

    scenario: Scenario
    folder: Path
    limit: float


@dataclass(frozen=True)
class Ended:
    """How a rank's process ended.

    Attributes:
        exit_code: negative for a signal; ``None`` if it had to be killed at the limit.
        at: on the monotonic clock, in seconds.
    """

    exit_code: int | None
    at: float
