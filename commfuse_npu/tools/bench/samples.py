"""What crosses from the ranks to the process that asked: plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Check", "Sample", "worst_check"]


@dataclass(frozen=True)
class Sample:
    """One run of a variant.  All in seconds.

    Attributes:
        total: wall time; of all ranks the longest.
        blocked: host time in waits for transfers; the mean of the ranks.
        cpu: CPU time of the process with all its threads; the mean of the ranks.
    """

    total: float
    blocked: float
    cpu: float

    @classmethod
    def of_ranks(cls, samples: Sequence[Sample]) -> Sample:
        count = len(samples)
        return cls(
            max(sample.total for sample in samples),
            sum(sample.blocked for sample in samples) / count,
            sum(sample.cpu for sample in samples) / count,
        )


@dataclass(frozen=True)
class Check:
    """What a variant computes, compared before anything is timed.

    Attributes:
        equal: the same bits as the reference, outputs and gradients, on every rank.
        max_difference: from the reference, absolute.
        equal_same_gemms: the same bits as the plain collectives with the GEMMs cut alike; only of
            this project's forms.
        peak_bytes: the most memory at once, results included.
        chosen: what tuning chose, per half of a layer.
    """

    equal: bool
    max_difference: float
    equal_same_gemms: bool | None
    peak_bytes: int
    chosen: tuple[str, ...] = ()


def worst_check(checks: Sequence[Check]) -> Check:
    """Of all ranks: equal only if all are."""
    same = [check.equal_same_gemms for check in checks]
    return Check(
        all(check.equal for check in checks),
        max(check.max_difference for check in checks),
        None if None in same else all(same),
        max(check.peak_bytes for check in checks),
        checks[0].chosen,
    )
