"""Results as text: a table per point, figures as ``typical (low .. high)``."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence

from commfuse_npu.tools.markdown import percent, table_row
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.sweep import Point, Range

__all__ = ["heading", "scale", "table"]

_COLUMNS = (
    *("variant", "step", "shorter", "exposed", "overhead removed", "waiting removed", "MFU"),
    *("tokens/s/NPU", "buffers", "lanes"),
)


def heading(hardware: Hardware, model: str, layout: str) -> str:
    """What is simulated, and how much of the hardware's description is assumed."""
    return (
        f"{model} on {hardware.name}: {layout}\n"
        f"Simulated, not measured. {hardware.assumed} of {hardware.path} have no public source at "
        "all; ranges are over its uncertainty."
    )


def table(point: Point) -> str:
    """A Markdown table of all variants at one point."""
    best = min(point.outcomes, key=lambda outcome: outcome.step.typical)
    rows = [table_row(_COLUMNS), "|---" * len(_COLUMNS) + "|"]
    for outcome in point.outcomes:
        name = outcome.variant
        rows.append(
            table_row(
                (
                    f"**{name}**" if outcome is best else name,
                    _range(outcome.step, _seconds),
                    _range(outcome.shorter, percent),
                    _range(outcome.exposed, _seconds),
                    _range(outcome.removed, percent),
                    _range(outcome.waiting_removed, percent),
                    _range(outcome.mfu, percent),
                    _range(outcome.tokens, "{:.0f}".format),
                    f"{outcome.buffers / 2**20:.0f} MiB",
                    f"{outcome.communicators / 2**20:.0f} MiB",
                )
            )
        )
    plain = point.outcomes[0]
    return (
        f"## sequence {point.sequence}, {point.npus} NPUs, {point.micro_batches} micro-batches\n"
        f"Communication / computation of a layer, plain: {_range(point.ratio, '{:.2f}'.format)}. "
        f"Shortest step at typical figures: {best.variant}, {best.shorter.typical:.1%} less than "
        f"{plain.variant}.\n\n" + "\n".join(rows)
    )


def scale(points: Sequence[Point]) -> str:
    """What simulating cost, point by point, and the memory of the process."""
    lines = ["| NPUs | sequence | simulated in |", "|---|---|---|"]
    lines += [f"| {p.npus} | {p.sequence} | {p.simulated_in:.2f} s |" for p in points]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return "\n".join([*lines, "", f"Peak memory of the simulator: {memory:.0f} MiB."])


def _range(value: Range, show: Callable[[float], str]) -> str:
    if math.isnan(value.typical):
        return "-"
    if value.low == value.high:
        return show(value.typical)
    return f"{show(value.typical)} ({show(value.low)} .. {show(value.high)})"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if abs(value) >= 10 else f"{value * 1e3:.1f} ms"
