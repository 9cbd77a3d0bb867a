"""The simulator's figures from what was timed.

A range goes from the lower to the upper quartile: of the layers where each has a figure of its own,
else of single calls.  Peaks that are a product's (:attr:`Peaks`) stay as they are described, and
what was measured becomes a share of them; where there is none the peak is what was reached.

=========================  =========================================================================
``npu.cube_flops``,        slope of a GEMM's seconds over its operations, as many as whole rounds
``npu.gemm_efficiency``    of tiles take where there are tiles
``npu.gemm_start``,        the same line where there is nothing to do: seconds, or the rows that
``npu.half_rows``          take as long
``npu.attention_...``      operations under the causal mask, of all queries, per second
``npu.hbm_...``            two bytes read and two written of each number that is copied
``npu.transfer_slowdown``  ``1 - alone / beside`` of a GEMM beside an exchange with all peers
``host.launch_overhead``   CPU time of the thread that posts a send and a receive and waits
``inside.rate``, ``...``   the largest message, on all lanes at once
``inside.latency``         half a ping-pong of 8 bytes
``inside.beside_work``     ``beside / alone`` of that exchange, where it outlasts the GEMM
=========================  =========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from commfuse_npu.tools.simulate.machine import TILE

__all__ = ["Measured", "Peaks", "Range", "figures", "quartiles"]

Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""By step: what was timed."""

Range = tuple[float, float, float]
"""Low, typical, high."""

_MOST_SLOWDOWN, _MOST_BESIDE = 0.9, 10.0
"""As much as a description takes."""
_LEAST = 1e-9


class Peaks(NamedTuple):
    """What a product can at best, of its description; ``cores`` is 0 where nothing is known.

    In cores, FLOP/s, and bytes per second of memory and of a link.
    """

    cores: int
    cube: float
    memory: float
    link: float


def figures(measured: Measured, peaks: Peaks) -> dict[str, Range]:
    """By dotted name; only those of steps that were measured."""
    found: dict[str, Range] = {}
    for step, of in (
        ("links", _links),
        ("gemms", _gemms),
        ("host", _host),
        ("beside", _beside),
        ("memory", _memory),
    ):
        if step in measured:
            found |= dict(of(measured[step], peaks))
    if "attention" in measured and (peaks.cores or "npu.cube_flops" in found):
        reached = peaks.cube if peaks.cores else found["npu.cube_flops"][1]
        found |= dict(_attention(measured["attention"], reached))
    return found


def quartiles(values: Sequence[float]) -> Range:
    """The lower quartile, the median and the upper quartile, of what is there."""
    ordered, last = sorted(values), len(values) - 1
    low, high = ordered[math.floor(last / 4)], ordered[math.ceil(3 * last / 4)]
    return low, median(ordered), high


def _shares(values: Sequence[float], peak: float, rate: str, share: str) -> Any:
    """A rate of its own without a known peak, else a share of it, which is 1 at the most."""
    if not peak:
        return (rate, quartiles(values)), (share, (1.0,) * 3)
    return (rate, (peak,) * 3), (share, quartiles([min(1.0, value / peak) for value in values]))


def _links(times: Sequence[Mapping[str, Any]], peaks: Peaks) -> Iterator[tuple[str, Range]]:
    pings = next(one for one in times if one.get("half a ping-pong"))
    yield "inside.latency", quartiles(pings["seconds"])
    largest = max(times, key=lambda one: (one["bytes"], one["lanes"]))
    rates = [largest["bytes"] / seconds for seconds in largest["seconds"]]
    yield from _shares(rates, peaks.link, "inside.rate", "inside.efficiency")


def _gemms(times: Sequence[Mapping[str, Any]], peaks: Peaks) -> Iterator[tuple[str, Range]]:
    rates, starts = [], []
    for layer in dict.fromkeys(one["layer"] for one in times):
        points = [
            (_operations(one, peaks.cores), median(one["seconds"]))
            for one in times
            if one["layer"] == layer
        ]
        slope, start = _line(points)
        if slope <= 0:
            continue  # the smallest takes longest: nothing but noise
        rates.append(1 / slope)
        of_row = next(2 * one["inputs"] * one["outputs"] for one in times if one["layer"] == layer)
        starts.append(max(0.0, start) if peaks.cores else max(_LEAST, start / slope / of_row))
    if rates:
        yield from _shares(rates, peaks.cube, "npu.cube_flops", "npu.gemm_efficiency")
        yield "npu.gemm_start" if peaks.cores else "npu.half_rows", quartiles(starts)


def _operations(one: Mapping[str, Any], cores: int) -> float:
    rows, outputs = one["rows"], one["outputs"]
    if cores:
        tiles = math.ceil(rows / TILE[0]) * math.ceil(outputs / TILE[1])
        return 2.0 * math.ceil(tiles / cores) * cores * TILE[0] * TILE[1] * one["inputs"]
    return 2.0 * rows * outputs * one["inputs"]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and value at 0 of the line with the least squares, each point by its own size."""
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


def _host(times: Sequence[Mapping[str, Any]], peaks: Peaks) -> Iterator[tuple[str, Range]]:
    yield "host.launch_overhead", quartiles(times[0]["seconds"])


def _beside(times: Sequence[Mapping[str, Any]], peaks: Peaks) -> Iterator[tuple[str, Range]]:
    by = {one["what"]: one["seconds"] for one in times}
    gemm, exchange = median(by["gemm"]), median(by["exchange"])
    slowed = [min(_MOST_SLOWDOWN, max(0.0, 1 - gemm / one)) for one in by["gemm beside"]]
    yield "npu.transfer_slowdown", quartiles(slowed)
    if median(by["both"]) > 1.02 * median(by["gemm beside"]):
        yield (
            "inside.beside_work",
            quartiles([min(_MOST_BESIDE, max(1.0, one / exchange)) for one in by["both"]]),
        )


def _memory(times: Sequence[Mapping[str, Any]], peaks: Peaks) -> Iterator[tuple[str, Range]]:
    copy = next(one for one in times if one["what"] == "copy")
    rates = [4 * copy["numbers"] / seconds for seconds in copy["seconds"]]
    yield from _shares(rates, peaks.memory, "npu.hbm_bandwidth", "npu.hbm_efficiency")


def _attention(times: Sequence[Mapping[str, Any]], reached: float) -> Iterator[tuple[str, Range]]:
    whole = max(times, key=lambda one: one["queries"])
    rows, keys = whole["queries"], whole["keys"]
    seen = rows * (keys - (rows - 1) / 2)
    operations = 4 * whole["heads"] * whole["of"] * seen
    shares = [min(1.0, operations / seconds / reached) for seconds in whole["seconds"]]
    yield "npu.attention_efficiency", quartiles(shares)
