"""Results as text: a table per point, figures as ``typical (low .. high)``."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence

from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.sweep import Point, Range

__all__ = ["heading", "scale", "table"]


def heading(hardware: Hardware, model: str, layout: str) -> str:
    """What is simulated, and how much of the hardware's description is assumed."""
    assumed = sum(figure.assumed for figure in hardware.figures.values())
    return (
        f"{model} on {hardware.name}: {layout}\n"
        f"Simulated, not measured. {assumed} of {len(hardware.figures)} figures of "
        f"{hardware.path} have no public source at all; ranges are over its uncertainty."
    )


def table(point: Point) -> str:
    """A Markdown table of all variants at one point."""
    best = min(point.outcomes, key=lambda outcome: outcome.step.typical)
    rows = [
        "| variant | step | shorter | exposed | overhead removed | waiting removed | MFU | "
        "tokens/s/NPU | buffers | lanes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in point.outcomes:
        mark = " **" if outcome is best else ""
        cells = (
            f"{mark.strip()}{outcome.variant}{mark.strip()}",
            _range(outcome.step, _seconds),
            _range(outcome.shorter, _percent),
            _range(outcome.exposed, _seconds),
            _range(outcome.removed, _percent),
            _range(outcome.waiting_removed, _percent),
            _range(outcome.mfu, _percent),
            _range(outcome.tokens, lambda value: f"{value:.0f}"),
            f"{outcome.buffers / 2**20:.0f} MiB",
            f"{outcome.communicators / 2**20:.0f} MiB",
        )
        rows.append(f"| {' | '.join(cells)} |")
    plain = point.outcomes[0]
    ratio = _range(point.ratio, lambda value: f"{value:.2f}")
    return (
        f"## sequence {point.sequence}, {point.npus} NPUs, {point.micro_batches} micro-batches\n"
        f"Communication / computation of a layer, plain: {ratio}. Shortest step at typical "
        f"figures: {best.variant}, {best.shorter.typical:.1%} less than {plain.variant}.\n\n"
        + "\n".join(rows)
    )


def scale(points: Sequence[Point]) -> str:
    """What simulating cost, point by point, and the memory of the process."""
    lines = ["| NPUs | sequence | simulated in |", "|---|---|---|"]
    lines += [f"| {p.npus} | {p.sequence} | {p.simulated_in:.2f} s |" for p in points]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return "\n".join([*lines, "", f"Peak memory of the simulator: {memory:.0f} MiB."])


def _range(value: Range, show: object) -> str:
    assert callable(show)
    if math.isnan(value.typical):
        return "-"
    if value.low == value.high:
        return str(show(value.typical))
    return f"{show(value.typical)} ({show(value.low)} .. {show(value.high)})"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if abs(value) >= 10 else f"{value * 1e3:.1f} ms"
