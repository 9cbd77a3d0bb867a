"""Two panels over sequence length: overhead removed, and end-to-end latency against plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.simulate.sweep import Point

__all__ = ["draw"]

_LOWEST = -50.0
"""Percent; a ring on a mesh is far below, and would flatten everything else."""


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the picture.  Lines: typical figures; bands of the best CommFuse: all corners.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or is of an unknown type.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    points = sorted(points, key=lambda point: point.sequence)
    lengths = [point.sequence for point in points]
    names = [outcome.variant for outcome in points[0].outcomes]
    fused = [name for name in names if name.startswith("commfuse")]
    best = min(
        fused,
        key=lambda name: sum(_of(point, name).step.typical for point in points),
        default=None,
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    styles = _styles(names)
    for name in names:
        removed = [100 * _of(point, name).removed.typical for point in points]
        relative = [
            _of(point, name).step.typical / point.outcomes[0].step.typical for point in points
        ]
        if all(math.isnan(value) or value < _LOWEST for value in removed):
            continue
        left.plot(lengths, removed, label=name, **styles[name])
        right.plot(lengths, relative, label=name, **styles[name])
    if best is not None:
        low = [max(_LOWEST, 100 * _of(point, best).removed.low) for point in points]
        high = [max(_LOWEST, 100 * _of(point, best).removed.high) for point in points]
        color = styles[best]["color"]
        left.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0,
                          label=f"{best}, range of the figures")  # fmt: skip
    left.set_ylabel("tensor-parallel overhead removed, % of plain-mesh")
    left.set_ylim(_LOWEST, 105)
    left.axhline(0, color="0.6", linewidth=0.8)
    right.set_ylabel("step time / plain-mesh")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("sequence length")
        axes.grid(alpha=0.3)
    left.set_title("communication overhead reduction")
    right.set_title("end-to-end latency")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(f"{title} (simulated)")
    with whole_file(path) as part:
        figure.savefig(part, dpi=120)
    plt.close(figure)


def _of(point: Point, name: str) -> Any:
    return next(outcome for outcome in point.outcomes if outcome.variant == name)


_FAMILIES = {
    "plain": ("0.35", "0.6"),
    "megatron": ("tab:orange",),
    "coc": ("#98df8a", "tab:green", "#145214"),
    "mc2": ("tab:red",),
    "commfuse": ("#9edae5", "#6baed6", "tab:blue", "#08306b", "tab:purple"),
}
_MARKERS = "osv^D"


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A hue per family, a shade and a marker per member."""
    seen: dict[str, int] = {}
    styles = {}
    for name in names:
        family = name.split("-")[0]
        shades = _FAMILIES.get(family, ("black",))
        number = seen.setdefault(family, 0)
        seen[family] += 1
        ours = family == "commfuse"
        styles[name] = {
            "color": shades[number % len(shades)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "linestyle": "-" if ours else "--",
            "linewidth": 1.8 if ours else 1.1,
            "markersize": 4,
        }
    return styles
