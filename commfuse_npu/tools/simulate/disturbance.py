"""Noise, slow links and stragglers, the same for the same seed.

Without any of them all ranks of a group do the same, and one of them is simulated for all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_npu.tools.simulate.launches import Launches

__all__ = ["Disturbance"]


@dataclass(frozen=True)
class Disturbance:
    """What is not as described.

    Args:
        seed: of everything random here.
        noise: standard deviation of the logarithm of how long work takes: 0.05 is about 5 %.
        slow_links: how many links between ordered pairs of ranks are slow, chosen by the seed.
        slow_link_factor: how much slower they are.
        stragglers: how many ranks are slow, chosen by the seed.
        straggler_factor: how much longer their work takes.

    Raises:
        ValueError: noise above 1, a negative number, or a factor below 1.
    """

    seed: int = 0
    noise: float = 0.0
    slow_links: int = 0
    slow_link_factor: float = 2.0
    stragglers: int = 0
    straggler_factor: float = 1.2

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise is {self.noise}; it has to be from 0 to 1")
        for name in ("slow_links", "stragglers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it cannot be negative")
        for name in ("slow_link_factor", "straggler_factor"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be 1 or more")

    @property
    def none(self) -> bool:
        """Whether everything is as described."""
        return not (self.noise or self.slow_links or self.stragglers)

    def slow(self, size: int) -> dict[tuple[int, int], float]:
        """Factor by which links of a group are slower, by (source, target)."""
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        chosen = random.Random(f"links {self.seed}").sample(pairs, min(self.slow_links, len(pairs)))
        return dict.fromkeys(chosen, self.slow_link_factor)

    def speeds(self, launches: Sequence[Launches]) -> list[list[float]]:
        """Factor by which each operation of each rank takes longer."""
        count = min(self.stragglers, len(launches))
        slow = set(random.Random(f"ranks {self.seed}").sample(range(len(launches)), count))
        speeds = []
        for rank, of_rank in enumerate(launches):
            numbers = random.Random(f"work {self.seed} {rank}")
            base = self.straggler_factor if rank in slow else 1.0
            speeds.append(
                [base * numbers.lognormvariate(0.0, self.noise) for _ in of_rank.operations]
            )
        return speeds
