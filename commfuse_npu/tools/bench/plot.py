"""The results as a picture: overhead removed, and the time relative to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.bench.results import Result
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours

__all__ = ["draw"]

_COLORMAPS = {
    "ours": "Blues",
    "coc": "Oranges",
    "slices": "RdPu",
    "ring": "Purples",
    "megatron": "Greens",
    "megatron-p2p": "Greens",
    "auto": "autumn_r",
    "collective": "Greys",
    REFERENCE: "Greys",
}
_MARKERS = {"ours": "o", "auto": "*", "coc": "s", "slices": "D", "ring": "^", "collective": "x"}
_DASHES = ("-", "--", ":", "-.")
_LOWEST = -0.5


def draw(results: Sequence[Result], path: Path) -> None:
    """A row per work and link, with two panels; the kind of file follows from the suffix.

    Left: overhead removed over the ratio, a line per variant, and shaded what no schedule can
    reach.  Right: end-to-end time relative to the reference.  Both say where other load disturbed
    most rounds.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    groups = [list(rows) for _, rows in groupby(results, key=lambda row: row.setting.group)]
    figure, grid = plt.subplots(
        len(groups), 2, figsize=(12, 3.8 * len(groups)), squeeze=False, layout="constrained"
    )
    for (left, right), rows in zip(grid, groups, strict=True):
        _panels(left, right, rows)
    with whole_file(path) as part:
        figure.savefig(part, dpi=110)
    plt.close(figure)


def _panels(left: Any, right: Any, rows: Sequence[Result]) -> None:
    mode, work, ranks, link, dtype = rows[0].setting.group
    names = list(dict.fromkeys(row.variant for row in rows))
    for name, style in zip(names, _styles(names), strict=True):
        mine = [row for row in rows if row.variant == name]
        ratios = [row.setting.ratio for row in mine]
        right.plot(ratios, [1 / row.speedup for row in mine], label=name, **style)
        # Without a limit nothing but copying is exposed: shares of it are noise.
        shown = [
            (r.setting.ratio, r.removed) for r in mine if r.removed is not None and r.setting.ratio
        ]
        if name != REFERENCE and shown:
            left.plot(*zip(*shown, strict=True), label=name, **style)
    _limit(left, right, [row for row in rows if row.variant == REFERENCE])
    title = f"{work}, {ranks} ranks, {dtype}, {link}"
    left.set_title(f"{title}\n{mode}", loc="left", fontsize=9)
    left.set(ylabel="overhead removed", ylim=(_LOWEST, 1.08))
    left.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    loud = sorted({row.setting.ratio for row in rows if row.inconclusive})
    if loud:
        said = f"other load: nothing can be concluded at {', '.join(f'{at:g}' for at in loud)}"
        for axes in (left, right):
            axes.text(
                0.02, 0.03, said, color="tab:red", bbox={"color": "white"}, transform=axes.transAxes
            )
    right.set_title(f"end to end, {REFERENCE} = 1", loc="left", fontsize=9)
    right.set(ylabel="time relative to blocking direct exchange")
    low, high = right.get_ylim()
    # Something very slow must not squeeze the rest.
    right.set_ylim(low, min(high, 1.6))
    for axes in (left, right):
        axes.set_xlabel("communication / computation")
        axes.grid(alpha=0.3)
    right.legend(fontsize=7, ncols=1 + len(names) // 13, loc="center left", bbox_to_anchor=(1, 0.5))


def _limit(left: Any, right: Any, rows: Sequence[Result]) -> None:
    """Shade what max(compute, wire) excludes."""
    rows = [row for row in rows if row.exposed_ms > 0]
    if not rows:
        return
    limited = [row for row in rows if row.setting.ratio]
    at = [row.setting.ratio for row in limited]
    left.fill_between(at, [row.hideable for row in limited], 1.08, color="0.85", zorder=0)
    left.plot(at, [row.hideable for row in limited], color="0.6", linewidth=1)
    left.set_xlim(right.get_xlim())
    ratios = [row.setting.ratio for row in rows]
    bounds = [row.bound_ms / row.median_ms for row in rows]
    right.fill_between(ratios, 0, bounds, color="0.85", zorder=0)
    right.plot(ratios, bounds, color="0.6", linewidth=1, label="bound")
    right.set_ylim(bottom=min(bounds) - 0.1)


def _styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """A colour per family, darker with its parameter; dashes tell the tapers and lanes apart."""
    import matplotlib as mpl

    families = [_family(name) for name in names]
    styles = []
    for place, (name, family) in enumerate(zip(names, families, strict=True)):
        number, count = families[:place].count(family), families.count(family)
        shade = 0.95 - 0.55 * number / (count - 1) if count > 1 else 0.65
        if name == REFERENCE:
            shade = 1.0
        styles.append(
            {
                "color": mpl.colormaps[_COLORMAPS.get(family, "Greys")](shade),
                "marker": _MARKERS.get(family, "."),
                "linestyle": _DASHES[("-t" in name) + 2 * ("-l" in name)],
                "linewidth": 1.8 if is_ours(name) else 1.2,
                "markersize": 4,
            }
        )
    return styles


def _family(name: str) -> str:
    for family in ("ours", "auto", "coc", "slices"):
        if name.startswith(family):
            return family
    return name
