"""From samples to figures.

Legend, all times of one work at one ratio in one run:

==================  ==============================================================================
total               median over the rounds; of the ranks the longest counts
compute             total of the work without any communication
wire                bytes over the rate of the link: what the transfers take at least
exposed             total - compute
overhead removed    1 - exposed / exposed of the reference (blocking direct exchange)
bound               max(compute, wire): no schedule can be faster
hideable            the share of the reference's exposed time that the bound allows to remove
of the hideable     (reference - total) / (reference - bound)
blocked removed     1 - blocked / blocked of the reference
==================  ==============================================================================
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commfuse_npu.tools.bench.variants import COMMUNICATION, COMPUTE, REFERENCE

__all__ = ["Check", "Result", "Sample", "Setting", "evaluate", "fastest", "worst_check"]


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


@dataclass(frozen=True)
class Setting:
    """What was measured.

    Attributes:
        mode: ``real GEMMs`` or ``sleeping GEMMs (... GFLOPS)``.
        link: a key of :data:`~commfuse_npu.tools.bench.programme.LINKS`.
        ratio: wire time over computing time that the link was set for.
        shape: sizes, as text.
        bytes_per_second: of the link; ``None`` without a limit.
        wire_ms: 0 without a limit.
    """

    mode: str
    work: str
    ranks: int
    link: str
    dtype: str
    ratio: float
    shape: str
    bytes_per_second: float | None
    wire_ms: float

    @property
    def group(self) -> tuple[str, str, int, str, str]:
        """What belongs into one table and one plot: everything but the ratio."""
        return self.mode, self.work, self.ranks, self.link, self.dtype


@dataclass(frozen=True)
class Result:
    """The figures of one variant in one setting; times in ms, shares signed.

    Attributes:
        removed: overhead removed; ``None`` if nothing of the reference was exposed.
        hideable: 0 to 1.
        of_hideable: ``None`` if the reference is at the bound.
        extra_mib: peak memory beyond that of the computation alone, in MiB; NaN if not measured.
    """

    setting: Setting
    variant: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    compute_ms: float
    communication_ms: float
    bound_ms: float
    exposed_ms: float
    removed: float | None
    hideable: float
    of_hideable: float | None
    blocked_ms: float
    blocked_removed: float | None
    speedup: float
    cpu_ms: float
    extra_mib: float
    check: Check
    rounds: int

    @property
    def spread_ms(self) -> float:
        """Between the quartiles."""
        low, high = self.quartiles_ms
        return high - low


def fastest(results: Iterable[Result]) -> Result:
    """The one with the shortest median; of equal ones the first."""
    return min(results, key=lambda result: result.median_ms)


def evaluate(
    setting: Setting, measured: Mapping[str, Sequence[Sample]], checks: Mapping[str, Check]
) -> list[Result]:
    """The figures of every variant but ``compute`` and ``communication``, in the given order.

    Args:
        measured: by variant, a sample per round.
        checks: by variant, ``compute`` included.
    """
    totals = {name: [1e3 * sample.total for sample in of] for name, of in measured.items()}
    median = {name: statistics.median(times) for name, times in totals.items()}
    compute, reference = median[COMPUTE], median[REFERENCE]
    bound = max(compute, setting.wire_ms)
    exposed_reference = reference - compute
    blocked_reference = _median_ms(s.blocked for s in measured[REFERENCE])
    results = []
    for name, samples in measured.items():
        if name in (COMPUTE, COMMUNICATION):
            continue
        total = median[name]
        blocked = _median_ms(s.blocked for s in samples)
        results.append(
            Result(
                setting=setting,
                variant=name,
                median_ms=total,
                quartiles_ms=_quartiles(totals[name]),
                compute_ms=compute,
                communication_ms=median[COMMUNICATION],
                bound_ms=bound,
                exposed_ms=total - compute,
                removed=_share(reference - total, exposed_reference),
                hideable=min(1.0, max(0.0, _share(reference - bound, exposed_reference) or 0.0)),
                of_hideable=_share(reference - total, reference - bound),
                blocked_ms=blocked,
                blocked_removed=_share(blocked_reference - blocked, blocked_reference),
                speedup=reference / total,
                cpu_ms=_median_ms(s.cpu for s in samples),
                extra_mib=_extra_mib(checks[name], checks[COMPUTE]),
                check=checks[name],
                rounds=len(samples),
            )
        )
    return results


def _median_ms(seconds: Iterable[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _quartiles(times: Sequence[float]) -> tuple[float, float]:
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, high


def _extra_mib(check: Check, compute: Check) -> float:
    if check.peak_bytes == 0:
        return math.nan
    return (check.peak_bytes - compute.peak_bytes) / 2**20


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
