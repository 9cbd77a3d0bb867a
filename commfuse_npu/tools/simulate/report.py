"""Results as cells and as text: a table per point, figures as ``typical (low .. high)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.markdown import percent, table_row
from commfuse_npu.tools.simulate.standing import Standing, seconds
from commfuse_npu.tools.simulate.sweep import Outcome, Point, Range

__all__ = ["COLUMNS", "cells", "heading", "headline", "ranged", "ratio", "rows_of",
           "table"]  # fmt: skip

COLUMNS = (
    *("variant", "step", "shorter", "exposed", "overhead removed", "MFU"),
    *("tokens/s/NPU", "buffers", "lanes"),
)


def heading(hardware: Hardware, model: str, layout: str) -> str:
    """What is simulated, and how much of the hardware's description is assumed."""
    return (
        f"{model} on {hardware.name}: {layout}\n"
        f"Simulated, not measured. {hardware.assumed} of {hardware.path} have no public source at "
        "all; ranges are over its uncertainty."
    )


def rows_of(point: Point, standing: Standing, names: Sequence[str]) -> list[Outcome]:
    """Those with these names, ideal bounds last."""
    kept = [one for one in point.outcomes if one.variant in names]
    return sorted(kept, key=lambda one: standing.roles[one.variant] == "bound")


def cells(point: Point, standing: Standing, names: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each variant with these names, under :data:`COLUMNS`."""
    rows = rows_of(point, standing, names)
    real = [one for one in rows if standing.roles[one.variant] != "bound"]
    best = min(real, key=lambda one: one.step.typical)
    found: list[tuple[str, ...]] = []
    for one in rows:
        name = f"**{one.variant}**" if one is best else one.variant
        if standing.roles[one.variant] == "bound":
            name += " (ideal bound)"
        found.append(
            (
                name,
                ranged(one.step, seconds),
                ranged(one.shorter, percent),
                ranged(one.exposed, seconds),
                ranged(one.removed, percent),
                ranged(one.mfu, percent),
                ranged(one.tokens, "{:.0f}".format),
                f"{one.buffers / 2**20:.0f} MiB",
                f"{one.communicators / 2**20:.0f} MiB",
            )
        )
    return found


def headline(point: Point) -> str:
    """What is the same for all variants at a point."""
    return f"sequence {point.sequence}, {point.npus} NPUs, {point.micro_batches} micro-batches"


def ratio(point: Point) -> str:
    """How much there is to hide."""
    said = ranged(point.ratio, "{:.2f}".format)
    return f"Communication / computation of a layer, plain: {said}."


def table(point: Point, standing: Standing, names: Sequence[str]) -> str:
    """A Markdown table of the variants with these names at one point."""
    lines = [f"## {headline(point)}", ratio(point), "", table_row(COLUMNS)]
    lines += ["|---" * len(COLUMNS) + "|", *map(table_row, cells(point, standing, names))]
    left = len(point.outcomes) - len(names)
    if left:
        lines += ["", f"{left} more variants were simulated; --all shows them."]
    return "\n".join(lines)


def ranged(value: Range, show: Callable[[float], str]) -> str:
    """``typical (low .. high)``; a dash where there is none."""
    if math.isnan(value.typical):
        return "-"
    if value.low == value.high:
        return show(value.typical)
    return f"{show(value.typical)} ({show(value.low)} .. {show(value.high)})"
