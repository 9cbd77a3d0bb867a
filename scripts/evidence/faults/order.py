"""What the launcher asks of the process that forks the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.evidence.faults.scenario import Scenario

__all__ = ["Order"]


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
