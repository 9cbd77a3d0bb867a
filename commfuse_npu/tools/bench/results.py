"""From samples to figures, and to the JSON that ``--json`` writes and ``--from`` reads.

Legend, all times of one workload at one ratio in one run:

==================  ==============================================================================
total               median over the rounds of the slowest rank's time
compute             total of the workload without any communication
wire                bytes / rate of the link: a lower bound on the time of the transfers
exposed             total - compute
overhead removed    1 - exposed / exposed of the reference (blocking direct exchange)
bound               max(compute, wire): no schedule can be faster
hideable            the share of the reference's exposed time that the bound allows to remove
of the hideable     (reference - total) / (reference - bound)
blocked removed     1 - blocked / blocked of the reference
==================  ==============================================================================

A share is ``None`` if its denominator is not positive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any, get_args, get_origin, get_type_hints

from commfuse_npu.tools.bench.variants import COMMUNICATION, COMPUTE, REFERENCE
from commfuse_npu.tools.quartiles import quartiles

__all__ = ["Check", "Result", "Sample", "Setting", "evaluate", "fastest", "load", "restored"]


@dataclass(frozen=True)
class Sample:
    """One run of a variant, in seconds.

    Attributes:
        total: wall time of the slowest rank.
        blocked: host time spent waiting for transfers, averaged over the ranks.
        cpu: CPU time of the process with all its threads, averaged over the ranks.
    """

    total: float
    blocked: float
    cpu: float

    @classmethod
    def of_ranks(cls, samples: Sequence[Sample]) -> Sample:
        return cls(
            max(sample.total for sample in samples),
            mean(sample.blocked for sample in samples),
            mean(sample.cpu for sample in samples),
        )


@dataclass(frozen=True)
class Check:
    """Comparison of a variant's results with the reference, before anything is timed.

    Attributes:
        equal: outputs and gradients are bitwise equal to the reference on every rank.
        max_difference: largest absolute difference from the reference.
        equal_same_gemms: bitwise equal to plain collectives with the same split of GEMMs; only for
            this project's forms.
        chosen: the choices of tuning, per half of a layer.
    """

    equal: bool
    max_difference: float
    equal_same_gemms: bool | None
    chosen: tuple[str, ...] = ()

    @classmethod
    def of_ranks(cls, checks: Sequence[Check]) -> Check:
        """Combine the checks of all ranks: equal only if all are."""
        same = [check.equal_same_gemms for check in checks]
        return cls(
            all(check.equal for check in checks),
            max(check.max_difference for check in checks),
            None if None in same else all(same),
            checks[0].chosen,
        )


@dataclass(frozen=True)
class Setting:
    """The conditions of a measurement.

    Attributes:
        mode: ``real GEMMs`` or ``sleeping GEMMs (... GFLOPS)``.
        link: a key of :data:`~commfuse_npu.tools.bench.sweep.LINKS`.
        ratio: wire time / computing time for which the link was set.
        shape: sizes, as text.
        link_bytes_per_second: ``None`` without a limit.
        wire_ms: 0 without a limit.
    """

    mode: str
    work: str
    ranks: int
    link: str
    dtype: str
    ratio: float
    shape: str
    link_bytes_per_second: float | None
    wire_ms: float

    @property
    def group(self) -> tuple[str, str, int, str, str]:
        """The key of a table and of a plot: everything except the ratio."""
        return self.mode, self.work, self.ranks, self.link, self.dtype


@dataclass(frozen=True)
class Result(Setting):
    """The figures of one variant in one setting, as ``--json`` writes them; times in ms.

    Attributes:
        reference: the variant that it is compared with.
        measured_ratio: wire time / measured computing time.
        overhead_removed, hideable: clipped to 0..1; other shares are signed.
        bitwise_equal, bitwise_equal_same_gemms, max_difference, chosen: from its :class:`Check`.
    """

    variant: str
    reference: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    compute_ms: float
    communication_ms: float
    measured_ratio: float
    bound_ms: float
    exposed_ms: float
    speedup: float
    overhead_removed: float
    overhead_removed_signed: float | None
    hideable: float
    of_hideable: float | None
    blocked_ms: float
    blocked_removed: float | None
    cpu_ms: float
    bitwise_equal: bool
    bitwise_equal_same_gemms: bool | None
    max_difference: float
    chosen: tuple[str, ...]
    rounds: int

    @property
    def setting(self) -> Setting:
        """The setting alone, without the figures."""
        return Setting(*(getattr(self, field.name) for field in fields(Setting)))

    @property
    def spread_ms(self) -> float:
        return self.quartiles_ms[1] - self.quartiles_ms[0]


def fastest(results: Iterable[Result]) -> Result:
    """The result with the shortest median; the first one of a tie."""
    return min(results, key=lambda result: result.median_ms)


def evaluate(
    setting: Setting, measured: Mapping[str, Sequence[Sample]], checks: Mapping[str, Check]
) -> list[Result]:
    """The figures of every variant except ``compute`` and ``communication``, in the given order.

    Args:
        measured: by variant, one sample per round.
        checks: by variant.
    """

    times = {name: quartiles([1e3 * run.total for run in runs]) for name, runs in measured.items()}
    blocked = {name: 1e3 * median(run.blocked for run in runs) for name, runs in measured.items()}
    compute, reference = times[COMPUTE][1], times[REFERENCE][1]
    exposed, bound = reference - compute, max(compute, setting.wire_ms)
    results = []
    for name, (low, middle, high) in times.items():
        if name in (COMPUTE, COMMUNICATION):
            continue
        check = checks[name]
        removed = _share(reference - middle, exposed)
        results.append(
            Result(
                **vars(setting),
                variant=name,
                reference=REFERENCE,
                median_ms=middle,
                quartiles_ms=(low, high),
                compute_ms=compute,
                communication_ms=times[COMMUNICATION][1],
                measured_ratio=setting.wire_ms / compute,
                bound_ms=bound,
                exposed_ms=middle - compute,
                speedup=reference / middle,
                overhead_removed=_clipped(removed),
                overhead_removed_signed=removed,
                hideable=_clipped(_share(reference - bound, exposed)),
                of_hideable=_share(reference - middle, reference - bound),
                blocked_ms=blocked[name],
                blocked_removed=_share(blocked[REFERENCE] - blocked[name], blocked[REFERENCE]),
                cpu_ms=1e3 * median(run.cpu for run in measured[name]),
                bitwise_equal=check.equal,
                bitwise_equal_same_gemms=check.equal_same_gemms,
                max_difference=check.max_difference,
                chosen=check.chosen,
                rounds=len(measured[name]),
            )
        )
    return results


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _clipped(share: float | None) -> float:
    return min(1.0, max(0.0, share or 0.0))


def load(path: Path) -> tuple[dict[str, Any], list[Result], list[str]]:
    """Read a file that ``--json`` wrote; returns machine, results, notes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file; the message says what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        machine = dict(content["machine"])
        notes = list(machine.pop("notes"))
        return machine, [restored(row) for row in content["results"]], notes
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__} {error}"
        if isinstance(error, KeyError):
            why = f"there is no {error} in it"
        raise ValueError(f"{path}: not what `commfuse-npu bench --json` writes: {why}") from error


def restored(row: Mapping[str, Any]) -> Result:
    """Create a result from its JSON.

    Refuses values that the report could not show, such as text for a number or a number that no
    float holds.

    Raises:
        KeyError, TypeError: it is not a valid result.
    """
    values: dict[str, Any] = {}
    for name, kind in get_type_hints(Result).items():
        value = row[name]
        values[name] = tuple(value) if get_origin(kind) is tuple else value
        if not _fits(values[name], kind):
            raise TypeError(f"{name} is {str(value)[:80]!r}")
    return Result(**values)


def _fits(value: Any, kind: Any) -> bool:
    options = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = options[:1] * len(value) if options[-1] is ... else options
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if options:
        return any(_fits(value, option) for option in options)
    if kind not in (int, float):
        return isinstance(value, kind)
    numbers = (int, float) if kind is float else int
    return isinstance(value, numbers) and not isinstance(value, bool) and not abs(value) > 1e300
