"""All settings of a run in one table: ours, and the fastest of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from commfuse_npu.tools.bench.programme import LINKS
from commfuse_npu.tools.bench.results import Result, Setting
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours

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
        parts += [
            "",
            f"**{ranks} ranks, {mode}, {dtype}, {link}** ({LINKS[link]})",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            f"|---{'|---:' * (len(_COLUMNS) - 1)}|",
        ]
        parts += [_row(setting, list(of)) for setting, of in groupby(rows, key=lambda r: r.setting)]
    return "\n".join(parts) + "\n"


def _table_of(setting: Setting) -> tuple[str, int, str, str]:
    return setting.mode, setting.ranks, setting.link, setting.dtype


def _row(setting: Setting, rows: Sequence[Result]) -> str:
    best = min(rows, key=lambda row: row.median_ms)
    low, high = best.quartiles_ms

    def cell(found: Iterator[Result], *, named: bool = True) -> str:
        fastest = min(found, key=lambda row: row.median_ms, default=None)
        if fastest is None:
            return "-"
        text = f"{fastest.speedup:.2f}x"
        if fastest.removed is not None and setting.bytes_per_second is not None:
            blocked = fastest.blocked_removed
            inner = "" if blocked is None else f" ({100 * blocked:.0f} %)"
            text += f", {100 * fastest.removed:.0f} %{inner}"
        spread = max(high - low, fastest.quartiles_ms[1] - fastest.quartiles_ms[0])
        if fastest.median_ms - best.median_ms <= spread / 2:
            text = f"**{text}**"
        return f"{text} {fastest.variant}" if named else text

    return " | ".join(
        (
            f"| {setting.work}",
            f"{setting.ratio:g}",
            cell((row for row in rows if row.variant == "auto"), named=False),
            cell(row for row in rows if is_ours(row.variant)),
            cell(
                row
                for row in rows
                if not is_ours(row.variant) and row.variant not in (REFERENCE, *_MEGATRON)
            ),
            cell(row for row in rows if row.variant in _MEGATRON) + " |",
        )
    )


_MEGATRON = ("megatron", "megatron-p2p")
