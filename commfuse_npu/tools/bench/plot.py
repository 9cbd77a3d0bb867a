"""The results as pictures: a group of settings each, times over ratios or as bars."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from commfuse_npu.tools.bench.report import title
from commfuse_npu.tools.bench.results import Result
from commfuse_npu.tools.bench.standing import shown
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours
from commfuse_npu.tools.report.charts import Bar, Line, Picture, bars, lines

__all__ = ["pictures"]

_FAR = 1.6
"""Times the reference: something very slow must not squeeze the rest."""
_TINTS = {REFERENCE: "grey", "megatron": "orange", "collective": "orange"}


def pictures(results: Sequence[Result], every: bool = False) -> list[Picture]:
    """One for each group of settings; of all variants, or of five."""
    drawn = []
    for _, of_group in groupby(results, key=lambda result: result.setting.group):
        rows = list(of_group)
        names = list(dict.fromkeys(row.variant for row in rows)) if every else shown(rows)
        ratios = {row.setting.ratio for row in rows}
        rows = [row for row in rows if row.variant in names]
        drawn.append((_over_ratios if len(ratios) > 1 else _at_one)(rows))
    return drawn


def _over_ratios(rows: Sequence[Result]) -> Picture:
    """A line per variant, and the bound that nobody can pass."""
    found: dict[str, list[tuple[float, float]]] = {}
    far = set()
    for row in rows:
        relative = 1 / row.speedup
        if relative > _FAR:
            far.add(row.variant)
        elif row.variant != REFERENCE:
            found.setdefault(row.variant, []).append((row.setting.ratio, relative))
    of_reference = [row for row in rows if row.variant == REFERENCE]
    bounds = tuple((row.setting.ratio, row.bound_ms / row.median_ms) for row in of_reference)
    drawn = [Line(name, tuple(points), is_ours(name)) for name, points in found.items()]
    drawn.append(Line("bound, max(compute, wire)", bounds))
    note = f"More than {_FAR} in part, not drawn: {', '.join(sorted(far))}." if far else ""
    return lines(
        f"{title(rows[0].setting)}: time, {REFERENCE} = 1, lower is better",
        "communication / computation",
        drawn,
        line=(f"{REFERENCE}, blocking", 1.0),
        note=note,
    )


def _at_one(rows: Sequence[Result]) -> Picture:
    """A bar per variant, with its quartiles."""
    compared = next(row for row in rows if row.variant == REFERENCE)
    near = [row for row in rows if row.median_ms <= _FAR * compared.median_ms]
    drawn = [
        Bar(
            row.variant,
            row.median_ms,
            *row.quartiles_ms,
            f"{row.variant}: {row.median_ms:.1f} ms "
            f"({row.quartiles_ms[0]:.1f} .. {row.quartiles_ms[1]:.1f})",
            "blue" if is_ours(row.variant) else _TINTS.get(row.variant, "green"),
        )
        for row in near
    ]
    bound = compared.bound_ms
    said = f"bound, max(compute, wire): {bound:.1f} ms"
    drawn.append(Bar("bound", bound, bound, bound, said, "purple"))
    far = ", ".join(row.variant for row in rows if row not in near)
    note = f"More than {_FAR} times {REFERENCE}, not drawn: {far}." if far else ""
    today = next((row for row in rows if row.variant in ("megatron", "collective")), compared)
    return bars(
        f"{title(rows[0].setting)}, ratio {rows[0].setting.ratio:g}",
        "ms, median and quartiles, lower is better",
        drawn,
        (today.variant, today.median_ms),
        note,
    )
