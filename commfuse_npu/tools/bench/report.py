"""The results as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from math import isnan
from typing import Any

from commfuse_npu.tools.bench.programme import LINKS
from commfuse_npu.tools.bench.results import Result, Setting, fastest
from commfuse_npu.tools.bench.shapes import WORKS
from commfuse_npu.tools.bench.standing import of_settings, shown
from commfuse_npu.tools.bench.summary import summary
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours
from commfuse_npu.tools.markdown import percent, table_row

__all__ = ["COLUMNS", "LEGEND", "about", "as_markdown", "cells", "setting_line", "title"]

LEGEND = f"""\
`{REFERENCE}`, a blocking direct exchange at line rate, is the reference.

- **wall removed**: of the time that it takes longer than the computation alone, the share that is
  gone; negative is slower than it. **blocked removed**: the same of the host's time in waits for
  transfers. **of bound**: of what max(compute, wire) allows to remove.
- Times in ms: median and quartiles; CPU and waiting per rank. MiB: peak memory beyond that of the
  computation alone.
- **bits**: equal to those of `{REFERENCE}`, else the largest difference. "same GEMMs: equal" are
  those of the plain collectives with the GEMMs cut alike.
- `collective`, `coc-K` and `megatron` use torch's collectives; gloo's reduce-scatter sends an
  all-reduce's bytes."""

COLUMNS = (
    *("variant", "total", "quartiles", "exposed", "wall removed", "blocked removed", "of bound"),
    *("speed-up", "CPU", "waiting", "MiB", "bits"),
)
_HEAD = f"{table_row(COLUMNS)}\n|---{'|---:' * (len(COLUMNS) - 2)}|---|"


def as_markdown(
    machine: Mapping[str, Any],
    results: Sequence[Result],
    notes: Sequence[str],
    every: bool = False,
) -> str:
    """A summary, then a heading per work, a table per ratio, and below each who is ahead of whom.

    Args:
        notes: what was skipped or is otherwise not as asked.
        every: all variants in each table, not five.
    """
    facts = [f"- {key}: {entry}" for key, lines in about(machine).items() for entry in lines]
    parts = ["# Overlap benchmark", "", *facts, *(f"- **{note}**" for note in notes)]
    parts += ["", summary(results), LEGEND]
    for group, of_group in groupby(results, key=lambda result: result.setting.group):
        mode, work, ranks, link, dtype = group
        parts += ["", f"## {WORKS[work]}"]
        parts += ["", f"{mode}, {ranks} ranks, {dtype}, {link}: {LINKS[link]}"]
        found = list(of_group)
        names = {row.variant for row in found} if every else set(shown(found))
        for setting, rows in of_settings(found).items():
            parts += ["", *_table(setting, rows, names)]
    return "\n".join(parts) + "\n"


def about(machine: Mapping[str, Any]) -> dict[str, list[str]]:
    """The machine, as lines by what they are."""
    return {
        key: [str(entry) for entry in (value if isinstance(value, list) else [value])]
        for key, value in machine.items()
    }


def title(setting: Setting) -> str:
    """What is the same for a group of settings, in a few words."""
    return f"{WORKS[setting.work]}, {setting.ranks} ranks, {setting.dtype}, {setting.link}"


def setting_line(setting: Setting, rows: Sequence[Result]) -> str:
    """What a table is about."""
    first = rows[0]
    rate = setting.bytes_per_second
    link = "no limit" if rate is None else f"{rate / 1e6:.1f} MB/s, wire {setting.wire_ms:.1f}"
    return (
        f"**Ratio {setting.ratio:g}** ({setting.shape}): compute alone {first.compute_ms:.1f}, "
        f"communication alone {first.communication_ms:.1f} ({link}), bound {first.bound_ms:.1f}, "
        f"wire / compute {setting.wire_ms / first.compute_ms:.2f}, "
        f"hideable {percent(first.hideable)}; {first.rounds} rounds"
    )


def cells(rows: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """A row for each, under :data:`COLUMNS`; the fastest in bold."""
    best = fastest(rows).median_ms
    for row in rows:
        low, high = row.quartiles_ms
        yield (
            f"**{row.variant}**" if row.median_ms == best else row.variant,
            f"{row.median_ms:.1f}", f"{low:.1f}-{high:.1f}", f"{row.exposed_ms:.1f}",
            percent(row.removed), percent(row.blocked_removed), percent(row.of_hideable),
            f"{row.speedup:.2f}x", f"{row.cpu_ms:.1f}", f"{row.blocked_ms:.1f}",
            "-" if isnan(row.extra_mib) else f"{row.extra_mib:.1f}", _bits(row),
        )  # fmt: skip


def _table(setting: Setting, rows: Sequence[Result], names: Collection[str]) -> Iterator[str]:
    yield setting_line(setting, rows)
    yield ""
    yield _HEAD
    yield from map(table_row, cells([row for row in rows if row.variant in names]))
    yield ""
    if len(names) < len(rows):
        yield f"{len(rows) - len(names)} more variants were measured; --all shows them.\n"
    for row in rows:
        if row.check.chosen:
            yield f"Chosen by {row.variant}: {'; '.join(row.check.chosen)}.\n"
    yield from _who_is_ahead(rows)


def _who_is_ahead(rows: Sequence[Result]) -> Iterator[str]:
    ours = [row for row in rows if is_ours(row.variant)]
    others = [row for row in rows if not is_ours(row.variant)]
    if ours and others:
        mine, best = fastest(ours), fastest(others)
        change = best.median_ms / mine.median_ms - 1
        within = abs(best.median_ms - mine.median_ms) <= max(mine.spread_ms, best.spread_ms)
        yield (
            f"Fastest of ours: {mine.variant}, {abs(change):.1%} "
            f"{'ahead of' if change >= 0 else '**slower than**'} the fastest other, {best.variant}"
            f"{' (within the quartiles)' if within else ''}."
        )
    reference = next(row for row in rows if row.variant == REFERENCE)
    slower = [
        f"{row.variant} ({percent(1 / row.speedup - 1)})"
        for row in rows
        if row is not reference and row.quartiles_ms[0] > reference.quartiles_ms[1]
    ]
    if slower:
        yield f"Slower than {REFERENCE}, beyond both quartiles: {', '.join(slower)}."


def _bits(row: Result) -> str:
    if row.check.equal:
        return "equal"
    text = f"{row.check.max_difference:.1e}"
    return f"{text} (same GEMMs: equal)" if row.check.equal_same_gemms else text
