"""The results of a training: its losses, its times, and why it failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from commfuse_npu.tools.quartiles import Range, quartiles

__all__ = ["WARM_UP_ITERATIONS", "Outcome", "Wait"]

WARM_UP_ITERATIONS = 3
"""Iterations that do not count: they create buffers and threads and prepare GEMM kernels."""

Wait = tuple[float, float]
"""The start and the end of a rank's wait for a transfer, in seconds."""


@dataclass
class Outcome:
    """How a training ended, on one rank.

    Attributes:
        losses, times: of each iteration; seconds, a mean over the ranks.
        fastest, waits: seconds of the fastest iteration that counts, and this rank's waits for
            transfers in it.
        weights_sha256: of all ranks' weights and optimizers.
        layers: lines about the layers and their calls.
        error, code: why the training failed, and the exit code for it.
    """

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    fastest: float = math.inf
    waits: Sequence[Wait] = ()
    weights_sha256: str = ""
    layers: list[str] = field(default_factory=list)
    error: str = ""
    code: int = 0

    def add(self, loss: float, seconds: float, waits: Sequence[Wait]) -> None:
        """Add an iteration; its waits are in seconds since its start."""
        self.losses.append(loss)
        self.times.append(seconds)
        if self.counted and seconds < self.fastest:
            self.fastest, self.waits = seconds, waits

    @property
    def counted(self) -> list[float]:
        """The times after the first :data:`WARM_UP_ITERATIONS`."""
        return self.times[WARM_UP_ITERATIONS:]

    @property
    def seconds(self) -> Range:
        """Quartiles of those times."""
        return quartiles(self.counted)
