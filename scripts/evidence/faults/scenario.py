"""A fault and the place where it is planted: one row of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Fault", "Phase", "Place", "Scenario"]

Fault = Literal[
    "killed",
    "slow",
    "too slow",
    "user error",
    "all connections lost",
    "one connection lost",
    "no memory for scratch",
    "no memory for the output",
    "no lane: too many open files",
    "mismatch",
]
Phase = Literal["making lanes", "first use", "forward", "between", "backward"]
Place = Literal["first", "middle", "last"]


@dataclass(frozen=True)
class Scenario:
    """What is planted where.

    Attributes:
        operation: a key of :data:`~scripts.evidence.faults.operations.OPERATIONS`; of
            :data:`~scripts.evidence.faults.mismatches.MISMATCHES` for a mismatch.
        phase: when; ``first use`` is before the ranks have compared the operation.
        place: at which of the rank's sends in the phase (of its allocations, for memory).
        faulty: the rank where it is planted.
        peer: the other end of one connection that is lost.
        stay: a rank that reported stays alive until all have: nobody learns of the fault only
            because another process ended.
        quick: belongs to the short table too.
        timeout: seconds that a wait of the transport may take; also for making its lanes.
    """

    fault: Fault
    operation: str
    phase: Phase = "forward"
    place: Place = "middle"
    ranks: int = 3
    faulty: int = 1
    peer: int | None = None
    chunks: int = 2
    lanes: int = 2
    stay: bool = False
    quick: bool = False
    timeout: float = 3.0

    @property
    def name(self) -> str:
        """For ``--only``; of all rows another."""
        parts = [self.fault, self.operation, self.phase, self.place, f"{self.ranks} ranks"]
        return "/".join(part.replace(" ", "_") for part in parts)

    @property
    def where(self) -> str:
        """The place, in words."""
        if self.fault == "mismatch":
            return self.operation
        if self.phase == "making lanes":
            return "Transport.create"
        where = f"`{self.operation}`, {self.phase}"
        if self.phase in ("forward", "backward"):
            where += f", {self.place} {'allocation' if 'memory' in self.fault else 'send'}"
        return where + (", all stay alive" if self.stay else "")
