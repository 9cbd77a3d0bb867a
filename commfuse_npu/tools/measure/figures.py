"""Computes the simulator's figures from measured times.

A range spans the lower to the upper quartile: over layers, if each has its own figure, otherwise
over single calls.  With known peaks of the product (:attr:`Peaks`), the peaks are kept and a
measurement becomes a share of them; otherwise the measured rate is the peak.  ``docs/measure.md``
lists the step behind each figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from commfuse_npu.config_file import find_config, read_config
from commfuse_npu.hardware.machine import TILE
from commfuse_npu.tools.measure.steps import Times
from commfuse_npu.tools.quartiles import Range, quartiles

__all__ = ["Measured", "Peaks", "description", "figures"]

Measured = Mapping[str, Times]
"""Measured times, by step."""
Figures = Iterator[tuple[str, Range]]
"""Figures, by dotted name."""

_MOST_SLOWDOWN, _MOST_BESIDE, _MOST_COPIES = 0.9, 10.0, 4.0
"""Upper limits of these figures in a description."""
_LEAST = 1e-9


class Peaks(NamedTuple):
    """The peaks of a product, from its description; ``cores`` is 0 if none are known.

    Number of cores, FLOP/s, and bytes per second of memory and of a link.  ``switched``: one link
    is shared by all peers, instead of one link per peer.
    """

    cores: int
    cube: float
    memory: float
    link: float
    switched: bool = False


def figures(measured: Measured, peaks: Peaks) -> dict[str, Range]:
    """All figures that follow from the measured steps, by dotted name."""
    steps = {"links": _links, "gemms": _gemms, "host": _host, "beside": _beside,
             "memory": _memory}  # fmt: skip
    ranges: dict[str, Range] = {}
    for step, figures_of in steps.items():
        if step in measured:
            ranges |= dict(figures_of(measured[step], peaks))
    if peaks.cores and measured.keys() >= {"links", "collectives", "memory"}:
        (bandwidth, share) = (ranges[f"npu.hbm_{name}"][1] for name in ("bandwidth", "efficiency"))
        ranges |= dict(
            _copies(measured["links"], measured["collectives"], peaks, bandwidth * share)
        )
    if "attention" in measured and (peaks.cores or "npu.cube_flops" in ranges):
        reached = peaks.cube if peaks.cores else ranges["npu.cube_flops"][1]
        ranges |= dict(_attention(measured["attention"], peaks, reached))
    return ranges


def _shares(values: Sequence[float], peak: float, rate: str, share: str) -> Any:
    """A rate and its share of the peak, at most 1; without a peak the rate itself, and 1."""
    if not peak:
        return (rate, quartiles(values)), (share, (1.0,) * 3)
    return (rate, (peak,) * 3), (share, quartiles([min(1.0, value / peak) for value in values]))


def _links(times: Times, peaks: Peaks) -> Figures:
    yield "inside.latency", quartiles(_row(times, "half a ping-pong")["seconds"])
    messages = _row(times, "messages")
    yield from _rate(messages, messages["peers"], peaks)
    if peaks.cores:
        yield "host.message_copies", (0.0,) * 3


def _row(times: Times, what: str) -> Mapping[str, Any]:
    return {row["what"]: row for row in times}[what]


def _rate(row: Mapping[str, Any], peers: int, peaks: Peaks) -> Figures:
    """The rate of links that carried a message to each of ``peers`` peers at once."""
    carried = row["bytes"] * (peers if peaks.switched else 1)
    rates = [carried / seconds for seconds in row["seconds"]]
    yield from _shares(rates, peaks.link, "inside.rate", "inside.efficiency")


def _copies(links: Times, collectives: Times, peaks: Peaks, memory: float) -> Figures:
    """If lanes are slower than an all-gather, attribute the difference to copies.

    Args:
        memory: bytes/s.
    """
    messages, gather = _row(links, "messages"), _row(collectives, "all-gather")
    wire = median(gather["seconds"])
    if median(messages["seconds"]) > wire:
        yield from _rate(gather, messages["peers"], peaks)
        one_copy = 4 * messages["bytes"] / memory  # at both ends, read and written
        longer = [max(0.0, seconds - wire) for seconds in messages["seconds"]]
        copies = [min(_MOST_COPIES, seconds / one_copy) for seconds in longer]
        yield "host.message_copies", quartiles(copies)


def _gemms(times: Times, peaks: Peaks) -> Figures:
    rates, starts = [], []
    for layer in dict.fromkeys(row["layer"] for row in times):
        rows = [row for row in times if row["layer"] == layer]
        points = [(_operations(row, peaks.cores), median(row["seconds"])) for row in rows]
        slope, start = _line(points)
        if slope <= 0:
            continue  # the smallest GEMM takes longest: only noise
        rates.append(1 / slope)
        of_row = 2 * rows[0]["inputs"] * rows[0]["outputs"]
        starts.append(max(0.0, start) if peaks.cores else max(_LEAST, start / slope / of_row))
    if rates:
        yield from _shares(rates, peaks.cube, "npu.cube_flops", "npu.gemm_efficiency")
        yield "npu.gemm_start" if peaks.cores else "npu.half_rows", quartiles(starts)


def _operations(row: Mapping[str, Any], cores: int) -> float:
    rows, outputs = row["rows"], row["outputs"]
    if cores:
        tiles = math.ceil(rows / TILE[0]) * math.ceil(outputs / TILE[1])
        return 2.0 * math.ceil(tiles / cores) * cores * TILE[0] * TILE[1] * row["inputs"]
    return 2.0 * rows * outputs * row["inputs"]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line, with relative errors as weights."""
    weights = [1 / max(y, _LEAST) ** 2 for _, y in points]
    total = sum(weights)
    x0 = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y0 = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if not spread:
        return 0.0, y0
    moment = sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True))
    slope = moment / spread
    return slope, y0 - slope * x0


def _host(times: Times, peaks: Peaks) -> Figures:
    calls = {row["what"]: row["seconds"] for row in times}
    # gloo's transport posts a send and a receive separately; others post a batch.
    posted = [seconds / 2 for seconds in calls["single"]] if "single" in calls else calls["batch"]
    yield "host.post_overhead", quartiles(posted)
    yield "host.launch_overhead", quartiles(calls.get("GEMM", posted))


def _beside(times: Times, peaks: Peaks) -> Figures:
    calls = {row["what"]: row["seconds"] for row in times}
    gemm, exchange = median(calls["gemm"]), median(calls["exchange"])
    slowed = [min(_MOST_SLOWDOWN, max(0.0, 1 - gemm / seconds)) for seconds in calls["gemm beside"]]
    yield "npu.transfer_slowdown", quartiles(slowed)
    # On a CPU transfers and work share a core, so the slowdown of the work already covers it.
    if peaks.cores and median(calls["both"]) > 1.02 * median(calls["gemm beside"]):
        pairs = zip(calls["both"], calls["gemm beside"], strict=True)
        yield "inside.beside_work", quartiles([_longer(*pair, exchange) for pair in pairs])


def _longer(both: float, beside: float, exchange: float) -> float:
    """Factor on the time of a transfer beside work that ends before it.

    While the work runs (``beside`` seconds), the transfer progresses by ``beside / factor``.
    """
    passed = beside - (both - exchange)
    return max(1.0, beside / passed) if passed > beside / _MOST_BESIDE else _MOST_BESIDE


def _memory(times: Times, peaks: Peaks) -> Figures:
    copy = _row(times, "copy")
    rates = [4 * copy["numbers"] / seconds for seconds in copy["seconds"]]
    yield from _shares(rates, peaks.memory, "npu.hbm_bandwidth", "npu.hbm_efficiency")


def _attention(times: Times, peaks: Peaks, reached: float) -> Figures:
    whole = max(times, key=lambda row: row["queries"])
    lost = 0.0
    if peaks.cores and (halves := list(_half_queries(times))):
        yield "npu.half_rows", quartiles(halves)
        lost = median(halves) / whole["queries"]
    operations = _attended_operations(whole) * (1 + lost)
    shares = [min(1.0, operations / seconds / reached) for seconds in whole["seconds"]]
    yield "npu.attention_efficiency", quartiles(shares)


def _half_queries(times: Times) -> Iterator[float]:
    """Number of queries at which attention runs at half its asymptotic speed, per call.

    ``seconds / operations`` is fitted by a line over ``1 / queries``.
    """
    for call in zip(*(row["seconds"] for row in times), strict=True):
        points = [
            (1 / row["queries"], seconds / _attended_operations(row))
            for row, seconds in zip(times, call, strict=True)
        ]
        slope, at_many = _line(points)
        if at_many > 0:  # otherwise only noise
            yield max(0.0, slope / at_many)


def _attended_operations(row: Mapping[str, Any]) -> float:
    """Operations of attention under the causal mask: two products."""
    rows, keys = row["queries"], row["keys"]
    return float(4 * row["heads"] * row["of"] * rows * (keys - (rows - 1) / 2))


def description(
    base: str, name: str, measured: Measured, facts: Mapping[str, Any], source: str
) -> str:
    """A hardware description in yaml for ``simulate --hardware``.

    Args:
        base: the description in ``configs/hardware`` with the peaks and the unmeasured figures.
        name: of the machine.
        facts: of the machine.  If known, it has ``device bytes``, and ``cube cores``, by which the
            described peak is scaled.
        source: the source that is given for each measured figure.
    """
    import yaml

    content = read_config(find_config(base, "hardware"))
    npu, inside = content["npu"], content["inside"]
    cores = npu["cores"]["typical"]
    described = (npu["cube_flops"], npu["hbm_bandwidth"], inside["rate"])
    cube, memory, link = ((peak["typical"] if cores else 0.0) for peak in described)
    peaks = Peaks(cores, cube, memory, link, switched=inside["topology"] == "switched")
    ranges: dict[str, Range] = {}
    if cores and (cube_cores := facts.get("cube cores")):
        peaks = peaks._replace(cores=cube_cores, cube=peaks.cube * cube_cores / cores)
        ranges = {"npu.cores": (cube_cores,) * 3, "npu.cube_flops": (peaks.cube,) * 3}
    ranges |= figures(measured, peaks)
    if (size := facts.get("device bytes")) is not None:
        ranges["npu.hbm_bytes"] = (float(size),) * 3
    for dotted, (low, typical, high) in ranges.items():
        section, figure = dotted.split(".")
        entry = {"low": low, "typical": typical, "high": high, "source": source}
        content[section][figure] = entry
    content["name"] = name
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))
