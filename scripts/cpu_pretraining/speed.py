"""Tokens per second of a training, as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

__all__ = ["LEAST_COUNTED", "WARM_UP_ITERATIONS", "Speed", "speed_of"]

WARM_UP_ITERATIONS = 3
"""Iterations that do not count: buffers, threads and the kernels of the GEMMs come with them."""

LEAST_COUNTED = 10
"""Iterations behind a ratio of two speeds."""


@dataclass(frozen=True)
class Speed:
    """Medians over the iterations of a run after the first `WARM_UP_ITERATIONS`.

    Attributes:
        seconds: wall time per iteration, mean over the ranks.
        quartiles: of these.
        blocked: seconds of it, mean over the same ranks, blocked in tensor- and context-parallel
            communication (`exposed_time`); `None` where that was not measured.
        tokens: per iteration, over all ranks.
        first, last: the iterations that count.
        link_rate: megabytes per second of `--link-rate`, `None` without.
    """

    seconds: float
    quartiles: tuple[float, float]
    blocked: float | None
    tokens: int
    first: int
    last: int
    link_rate: float | None

    @property
    def counted(self) -> int:
        """Iterations."""
        return self.last - self.first + 1

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, of the median iteration."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        link = "over loopback"
        if self.link_rate is not None:
            link = f"over links of {self.link_rate:g} MB/s"
        fast, slow = self.quartiles
        blocked = ""
        if self.blocked is not None:
            blocked = f"of which {self.blocked:.3f} s blocked in communication; "
        return (
            f"{self.tokens_per_second:.0f} {link} ({self.seconds:.3f} s per iteration, quartiles "
            f"{fast:.3f} and {slow:.3f}, {blocked}"
            f"medians of iterations {self.first} to {self.last})"
        )


def speed_of(
    entries: Sequence[dict[str, Any]], *, tokens: int, link_rate: float | None
) -> Speed | None:
    """The speed of a run with these entries of `metrics.jsonl`; `None` if all were warm-up.

    Args:
        entries: one per iteration of this process, in order, validations left out.
        tokens: per iteration, over all ranks.
        link_rate: in megabytes per second, `None` without.
    """
    counted = entries[WARM_UP_ITERATIONS:]
    if not counted:
        return None
    seconds = [entry["elapsed_ms"] / 1e3 for entry in counted]
    blocked = [entry["exposed_ms"] / 1e3 for entry in counted if entry["exposed_ms"] is not None]
    fast, _, slow = quantiles(seconds * 2 if len(seconds) == 1 else seconds, method="inclusive")
    return Speed(
        seconds=median(seconds),
        quartiles=(fast, slow),
        blocked=median(blocked) if blocked else None,
        tokens=tokens,
        first=counted[0]["iteration"],
        last=counted[-1]["iteration"],
        link_rate=link_rate,
    )
