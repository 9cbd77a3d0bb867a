"""All settings of a run in one table: ours, and the fastest of the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from commfuse_npu.tools.bench.programme import LINKS
from commfuse_npu.tools.bench.results import Result, Setting, fastest
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours
from commfuse_npu.tools.markdown import table_row

__all__ = ["summary"]

_COLUMNS = ("work", "ratio", "auto", "fastest of ours", "fastest other", "Megatron's order")

_LEGEND = f"""\
Each cell: how many times as fast as `{REFERENCE}` (a blocking direct exchange at line rate), the
share of the exposed wall time that is gone, in brackets of the time blocked in waits. Bold: the
fastest of all, or as fast as the quartiles can tell. Ratio: wire time / computing time."""


def summary(results: Sequence[Result]) -> str:
    """A table per mode, number of ranks, link and dtype; a row per work and ratio."""
    parts = ["## Summary", "", _LEGEND]
    ordered = sorted(results, key=lambda result: _table_of(result.setting))
    for (mode, ranks, link, dtype), rows in groupby(ordered, key=lambda r: _table_of(r.setting)):
        parts += ["", f"**{ranks} ranks, {mode}, {dtype}, {link}** ({LINKS[link]})"]
        parts += ["", table_row(_COLUMNS), f"|---{'|---:' * (len(_COLUMNS) - 1)}|"]
        parts += [_row(setting, list(of)) for setting, of in groupby(rows, key=lambda r: r.setting)]
    return "\n".join(parts) + "\n"


def _table_of(setting: Setting) -> tuple[str, int, str, str]:
    return setting.mode, setting.ranks, setting.link, setting.dtype


def _row(setting: Setting, rows: Sequence[Result]) -> str:
    best = fastest(rows)

    def cell(found: Sequence[Result], *, named: bool = True) -> str:
        if not found:
            return "-"
        first = fastest(found)
        text = f"{first.speedup:.2f}x"
        if first.removed is not None and setting.bytes_per_second is not None:
            blocked = first.blocked_removed
            inner = "" if blocked is None else f" ({100 * blocked:.0f} %)"
            text += f", {100 * first.removed:.0f} %{inner}"
        if first.median_ms - best.median_ms <= max(best.spread_ms, first.spread_ms) / 2:
            text = f"**{text}**"
        return f"{text} {first.variant}" if named else text

    ours = [row for row in rows if is_ours(row.variant)]
    megatron = [row for row in rows if row.variant.startswith("megatron")]
    rest = [row for row in rows if row.variant != REFERENCE]
    others = [row for row in rest if row not in ours and row not in megatron]
    auto = [row for row in rows if row.variant == "auto"]
    return table_row(
        (
            setting.work,
            f"{setting.ratio:g}",
            cell(auto, named=False),
            *map(cell, (ours, others, megatron)),
        )
    )
