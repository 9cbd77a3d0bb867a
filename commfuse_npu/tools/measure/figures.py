"""Computes the simulator's figures from measured times.

A range spans the lower to the upper quartile: over layers, if each has its own figure, otherwise
over single calls.  If the base description knows the product's cores, its peaks are kept and a
measurement becomes a share of them; otherwise the measured rate is the peak.  ``docs/measure.md``
lists the step behind each figure.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import mul
from statistics import median
from typing import Any

from commfuse_npu.tools.config_file import read_config
from commfuse_npu.tools.hardware.description import Figure, Hardware
from commfuse_npu.tools.measure.measuring_steps import Times
from commfuse_npu.tools.quartiles import Range, quartiles

Measured = Mapping[str, Times]
"""Measured times, by step."""
Ranges = dict[str, Range]
Figures = Iterator[tuple[str, Range]]
"""Figures, by dotted name."""

_MOST_SLOWDOWN = 0.9
_MOST_BESIDE = 10.0
_MOST_COPIES = 4.0
"""Upper limits of these figures in a description."""


def figures(measured: Measured, base: Hardware) -> Ranges:
    """All figures that follow from the measured steps, by dotted name."""
    needed: dict[Callable[..., Figures], tuple[str, ...]] = {
        _links: ("links",),
        _gemms: ("gemms",),
        _host: ("host",),
        _beside: ("beside",),
        _memory: ("memory",),
        _copies: ("links", "collectives", "memory"),
        _attention: ("attention",),
    }
    ranges: Ranges = {}
    for figures_of, steps in needed.items():
        if measured.keys() >= set(steps):
            ranges |= dict(figures_of(*(measured[step] for step in steps), base, ranges))
    return ranges


def _cores(base: Hardware) -> int:
    """Number of cores; 0 if they and the peaks are unknown."""
    return base.machine().cores


def _shares(values: Sequence[float], base: Hardware, rate: str, share: str) -> Figures:
    """A rate and its share of the peak, at most 1; without a peak the rate itself, and 1."""
    peak = base.typical(rate)
    if _cores(base):
        yield rate, (peak,) * 3
        yield share, quartiles([min(1.0, value / peak) for value in values])
    else:
        yield rate, quartiles(values)
        yield share, (1.0,) * 3


def _links(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    yield "inside.latency", quartiles(_row(times, "half a ping-pong")["seconds"])
    messages = _row(times, "messages")
    yield from _rate(messages, messages["peers"], base)
    if _cores(base):
        yield "host.message_copies", (0.0,) * 3


def _row(times: Times, what: str) -> Mapping[str, Any]:
    return {row["what"]: row for row in times}[what]


def _rate(row: Mapping[str, Any], peers: int, base: Hardware) -> Figures:
    """The rate of links that carried a message to each of ``peers`` peers at once."""
    carried = row["bytes"] * (peers if base.topologies["inside"] == "switched" else 1)
    rates = [carried / seconds for seconds in row["seconds"]]
    yield from _shares(rates, base, "inside.rate", "inside.efficiency")


def _copies(
    links: Times, collectives: Times, memory: Times, base: Hardware, ranges: Ranges
) -> Figures:
    """If lanes are slower than an all-gather, attribute the difference to copies."""
    messages = _row(links, "messages")
    gather = _row(collectives, "all-gather")
    wire = median(gather["seconds"])
    if _cores(base) and median(messages["seconds"]) > wire:
        yield from _rate(gather, messages["peers"], base)
        bandwidth, share = (ranges[f"npu.hbm_{name}"][1] for name in ("bandwidth", "efficiency"))
        one_copy = 4 * messages["bytes"] / (bandwidth * share)  # at both ends, read and written
        longer = [max(0.0, seconds - wire) for seconds in messages["seconds"]]
        copies = [min(_MOST_COPIES, seconds / one_copy) for seconds in longer]
        yield "host.message_copies", quartiles(copies)


def _gemms(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    # Its seconds are the operations of whole rounds of tiles, or of the rows without cores.
    unit = replace(
        base.machine(), cube_flops=1.0, gemm_efficiency=1.0, gemm_start=0.0, half_rows=0.0,
        hbm_bandwidth=math.inf,
    )  # fmt: skip
    rates = []
    starts = []
    for layer in dict.fromkeys(row["layer"] for row in times):
        rows = [row for row in times if row["layer"] == layer]
        points = [
            (unit.gemm(row["rows"], row["inputs"], row["outputs"]), median(row["seconds"]))
            for row in rows
        ]
        slope, start = _line(points)
        if slope <= 0:
            continue  # the smallest GEMM takes longest: only noise
        rates.append(1 / slope)
        of_row = 2 * rows[0]["inputs"] * rows[0]["outputs"]
        starts.append(max(0.0, start if unit.cores else start / slope / of_row))
    if rates:
        yield from _shares(rates, base, "npu.cube_flops", "npu.gemm_efficiency")
        yield "npu.gemm_start" if unit.cores else "npu.half_rows", quartiles(starts)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line, with relative errors as weights."""
    weights = [1 / y**2 for _, y in points]

    def mean(values: Iterable[float]) -> float:
        return sum(map(mul, weights, values)) / sum(weights)

    x0 = mean(x for x, _ in points)
    y0 = mean(y for _, y in points)
    spread = mean((x - x0) ** 2 for x, _ in points)
    if not spread:
        return 0.0, y0
    slope = mean((x - x0) * (y - y0) for x, y in points) / spread
    return slope, y0 - slope * x0


def _host(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    calls = {row["what"]: row["seconds"] for row in times}
    yield "host.post_overhead", quartiles(calls["post"])
    yield "host.launch_overhead", quartiles(calls.get("GEMM", calls["post"]))


def _beside(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    calls = {row["what"]: row["seconds"] for row in times}
    gemm = median(calls["gemm"])
    exchange = median(calls["exchange"])
    slowed = [min(_MOST_SLOWDOWN, max(0.0, 1 - gemm / seconds)) for seconds in calls["gemm beside"]]
    yield "npu.transfer_slowdown", quartiles(slowed)
    # On a CPU transfers and work share a core, so the slowdown of the work already covers it.
    if _cores(base) and median(calls["both"]) > 1.02 * median(calls["gemm beside"]):
        pairs = zip(calls["both"], calls["gemm beside"], strict=True)
        yield "inside.beside_work", quartiles([_longer(*pair, exchange) for pair in pairs])


def _longer(both: float, beside: float, exchange: float) -> float:
    """Factor on the time of a transfer beside work that ends before it.

    While the work runs (``beside`` seconds), the transfer progresses by ``beside / factor``.
    """
    passed = beside - (both - exchange)
    return max(1.0, beside / passed) if passed > beside / _MOST_BESIDE else _MOST_BESIDE


def _memory(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    copy = _row(times, "copy")
    rates = [4 * copy["numbers"] / seconds for seconds in copy["seconds"]]
    yield from _shares(rates, base, "npu.hbm_bandwidth", "npu.hbm_efficiency")


def _attention(times: Times, base: Hardware, ranges: Ranges) -> Figures:
    whole = max(times, key=lambda row: row["queries"])
    lost = 0.0
    peak = ranges.get("npu.cube_flops", (0.0,) * 3)[1]
    if _cores(base):
        peak = base.typical("npu.cube_flops")
        if halves := list(_half_queries(times)):
            yield "npu.half_rows", quartiles(halves)
            lost = median(halves) / whole["queries"]
    if peak:
        operations = _attended_operations(whole) * (1 + lost)
        shares = [min(1.0, operations / seconds / peak) for seconds in whole["seconds"]]
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
    rows = row["queries"]
    keys = row["keys"]
    return float(4 * row["heads"] * row["of"] * rows * (keys - (rows - 1) / 2))


def description(
    base: Hardware, name: str, measured: Measured, facts: Mapping[str, Any], source: str
) -> str:
    """A hardware description in yaml for ``simulate --hardware``.

    Args:
        base: the description with the peaks and the unmeasured figures.
        name: of the machine.
        facts: of the machine.  If known, it has ``device bytes``, and ``cube cores``, by which the
            described peak is scaled.
        source: the source that is given for each measured figure.
    """
    import yaml

    content = read_config(base.path)
    ranges = Ranges()
    if (cores := _cores(base)) and (named := facts.get("cube cores")):
        peak = base.typical("npu.cube_flops") * named / cores
        ranges = {"npu.cores": (named,) * 3, "npu.cube_flops": (peak,) * 3}
        scaled = {name: Figure(*three, source) for name, three in ranges.items()}
        base = replace(base, figures={**base.figures, **scaled})
    ranges |= figures(measured, base)
    if (size := facts.get("device bytes")) is not None:
        ranges["npu.hbm_bytes"] = (float(size),) * 3
    for dotted, (low, typical, high) in ranges.items():
        section, figure = dotted.split(".")
        entry = {"low": low, "typical": typical, "high": high, "source": source}
        content[section][figure] = entry
    content["name"] = name
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))
