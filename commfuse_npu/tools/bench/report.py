"""The results as a verdict, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import log
from statistics import median
from typing import Any

from commfuse_npu.tools.bench.results import Result, Setting, fastest
from commfuse_npu.tools.bench.shapes import WORKS
from commfuse_npu.tools.bench.sweep import LINKS
from commfuse_npu.tools.bench.variants import REFERENCE, is_ours, of_group
from commfuse_npu.tools.markdown import percent, table_head, table_row

__all__ = ["as_markdown", "important_variants", "summary", "verdict"]

_LEGEND = f"""\
`{REFERENCE}`, a blocking direct exchange at line rate, is the reference.

- **wall removed**: of the time that it takes longer than the computation alone, the share that is
  gone; negative is slower than it. **blocked removed**: the same of the host's time in waits for
  transfers. **of bound**: of what max(compute, wire) allows to remove.
- Times in ms: median and quartiles; CPU and waiting per rank.
- **bits**: equal to those of `{REFERENCE}`, else the largest difference. "same GEMMs: equal" are
  those of the plain collectives with the GEMMs cut alike.
- `collective`, `coc-K` and `megatron` use torch's collectives; gloo's reduce-scatter sends an
  all-reduce's bytes."""

_SUMMARY = f"""\
Each cell: how many times as fast as `{REFERENCE}` (a blocking direct exchange at line rate), the
share of the exposed wall time that is gone, in brackets of the time blocked in waits. Bold: the
fastest of all, or as fast as the quartiles can tell. Ratio: wire time / computing time."""

_COLUMNS = (
    *("variant", "total", "quartiles", "exposed", "wall removed", "blocked removed", "of bound"),
    *("speed-up", "CPU", "waiting", "bits"),
)
_ORDERS = {
    "megatron": "Megatron's order",
    "megatron-p2p": "Megatron's order over direct exchanges",
    "collective": "torch's collectives",
}
"""What a user runs today: the first of them that was measured."""


def _by_group(results: Sequence[Result]) -> list[list[Result]]:
    """The results by table: each has settings that differ only in the ratio."""
    return [list(rows) for _, rows in groupby(results, key=lambda row: row.group)]


def _of_settings(results: Sequence[Result]) -> dict[Setting, list[Result]]:
    return {setting: list(rows) for setting, rows in groupby(results, key=lambda row: row.setting)}


def important_variants(results: Sequence[Result], all_variants: bool = False) -> list[str]:
    """The five most important variants of one group of settings, or all.

    They are the reference, what a user has today, the fastest other, the fastest CommFuse variant,
    each over all of these settings, and ``auto``.
    """
    names = list(dict.fromkeys(row.variant for row in results))
    today = _today(results)
    ours = _best(results, lambda name: is_ours(name) and name != "auto")
    other = _best(results, lambda name: not is_ours(name) and name not in (REFERENCE, today))
    return [
        name for name in names if all_variants or name in (REFERENCE, today, other, ours, "auto")
    ]


def verdict(results: Sequence[Result]) -> list[str]:
    """Two lines: CommFuse's best variant with its options, and its comparison; one if none ran."""
    # Prefer variants without per-block weight gradients, which round differently.
    ours = _best(results, lambda name: is_ours(name) and "-wgrad" not in name) or _best(
        results, is_ours
    )
    if ours is None:
        return ["Nothing of ours was measured: --variants 'ours-*,auto' would."]
    against_today, against_rival, orders = list[float](), list[float](), set[str]()
    for rows in _of_settings(results).values():
        times = {row.variant: row.median_ms for row in rows}
        if ours not in times:
            continue
        if (today := _today(rows)) is not None:
            against_today.append(times[ours] / times[today] - 1)
            orders.add(_ORDERS[today])
        rival = fastest(row for row in rows if not is_ours(row.variant))
        against_rival.append(times[ours] / rival.median_ms - 1)
    compared = f"{_change(against_rival)} the fastest other that was measured"
    if against_today:
        compared = f"{_change(against_today)} {' or '.join(sorted(orders))}; {compared}"
    number = len(against_rival)
    settings = "one setting" if number == 1 else f"{number} settings"
    return [
        f"Best of ours over {settings}: **{ours}**: `{_options(ours, results)}`",
        f"{compared[0].upper()}{compared[1:]}. The bound of each setting, max(compute, wire), "
        "cannot be launched.",
    ]


def _change(shares: Sequence[float]) -> str:
    """The median, the extremes, and the number of settings in which CommFuse is ahead."""
    if len(shares) == 1:
        return f"{_longer(shares[0])} than"
    ahead = sum(share < 0 for share in shares)
    return (
        f"in {ahead} of {len(shares)} settings ahead, {_longer(median(shares))} in the middle one "
        f"({_longer(min(shares))} to {_longer(max(shares))}) than"
    )


def _longer(share: float) -> str:
    return f"{100 * abs(share):.1f} % {'longer' if share > 0 else 'shorter'}"


def _options(name: str, results: Sequence[Result]) -> str:
    """The launch options of a CommFuse variant, as defined for a measured group size."""
    sizes = dict.fromkeys(row.ranks for row in results)
    variant = next(
        (variant for size in sizes for variant in of_group(size) if variant.name == name), None
    )
    if variant is None or variant.kind == "turns":
        return "--use-commfuse" if variant is None else "--commfuse-fb-overlap"
    options = ["--use-commfuse"]
    if variant.tuned:
        options.append("--commfuse-tuning on")
    elif (schedule := variant.schedule) is not None:
        options.append(f"--commfuse-lanes {schedule.lanes} --commfuse-chunks {schedule.chunks}")
        if schedule.taper != 1:
            options.append(f"--commfuse-taper {schedule.taper:g}")
    if variant.wgrad != "whole":
        options.append(f"--commfuse-wgrad {variant.wgrad}")
    return " ".join(options)


def _today(rows: Sequence[Result]) -> str | None:
    names = {row.variant for row in rows}
    return next((name for name in _ORDERS if name in names), None)


def _best(results: Sequence[Result], wanted: Callable[[str], bool]) -> str | None:
    """The variant measured in the most settings; among those the highest mean log speed-up."""
    speedups: dict[str, list[float]] = {}
    for row in results:
        if wanted(row.variant):
            speedups.setdefault(row.variant, []).append(log(row.speedup))
    return max(speedups, key=lambda name: (len(speedups[name]), sum(speedups[name])), default=None)


def as_markdown(
    machine: Mapping[str, Any],
    results: Sequence[Result],
    notes: Sequence[str],
    all_variants: bool = False,
) -> str:
    """A summary, then a heading per workload and a table per ratio.

    Args:
        notes: what was skipped or differs from the request.
        all_variants: all variants in each table, not five.
    """
    parts = ["# Overlap benchmark", ""]
    parts += [f"- {name}: {line}" for name, fact in machine.items() for line in _lines(fact)]
    parts += [*(f"- **{note}**" for note in notes), "", summary(results), _LEGEND]
    for rows in _by_group(results):
        mode, work, ranks, link, dtype = rows[0].group
        parts += ["", f"## {WORKS[work].title}"]
        parts += ["", f"{mode}, {ranks} ranks, {dtype}, {link}: {LINKS[link]}"]
        names = important_variants(rows, all_variants)
        for of_setting in _of_settings(rows).values():
            parts += ["", _headline(of_setting), "", table_head(_COLUMNS)]
            parts += map(table_row, _cells(of_setting, names))
            parts += ["", *_remarks(of_setting, names)]
    return "\n".join(parts) + "\n"


def summary(results: Sequence[Result]) -> str:
    """A table per mode, number of ranks, link and dtype, with a row per workload and ratio."""

    def table(result: Result) -> tuple[str, int, str, str]:
        return result.mode, result.ranks, result.link, result.dtype

    head = "work", "ratio", "auto", "fastest of ours", "fastest other", "Megatron's order"
    parts = ["## Summary", "", _SUMMARY]
    for (mode, ranks, link, dtype), rows in groupby(sorted(results, key=table), key=table):
        parts += ["", f"**{ranks} ranks, {mode}, {dtype}, {link}** ({LINKS[link]})"]
        parts += ["", table_head(head)]
        parts += map(_summary_row, _of_settings(list(rows)).values())
    return "\n".join(parts) + "\n"


def _summary_row(rows: Sequence[Result]) -> str:
    best = fastest(rows)

    def cell(found: Sequence[Result], *, named: bool = True) -> str:
        if not found:
            return "-"
        first = fastest(found)
        text, removed = f"{first.speedup:.2f}x", first.overhead_removed_signed
        if removed is not None and first.link_bytes_per_second is not None:
            blocked = first.blocked_removed
            inner = "" if blocked is None else f" ({100 * blocked:.0f} %)"
            text += f", {100 * removed:.0f} %{inner}"
        if first.median_ms - best.median_ms <= max(best.spread_ms, first.spread_ms) / 2:
            text = f"**{text}**"
        return f"{text} {first.variant}" if named else text

    ours = [row for row in rows if is_ours(row.variant)]
    megatron = [row for row in rows if row.variant.startswith("megatron")]
    others = [row for row in rows if row not in (*ours, *megatron) and row.variant != REFERENCE]
    auto = cell([row for row in rows if row.variant == "auto"], named=False)
    cells = (auto, *map(cell, (ours, others, megatron)))
    return table_row((best.work, f"{best.ratio:g}", *cells))


def _headline(rows: Sequence[Result]) -> str:
    first, rate = rows[0], rows[0].link_bytes_per_second
    link = "no limit" if rate is None else f"{rate / 1e6:.1f} MB/s, wire {first.wire_ms:.1f}"
    return (
        f"**Ratio {first.ratio:g}** ({first.shape}): compute alone {first.compute_ms:.1f}, "
        f"communication alone {first.communication_ms:.1f} ({link}), bound {first.bound_ms:.1f}, "
        f"wire / compute {first.measured_ratio:.2f}, "
        f"hideable {percent(first.hideable)}; {first.rounds} rounds"
    )


def _cells(rows: Sequence[Result], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row per variant, under :data:`_COLUMNS`; the fastest in bold."""
    rows = [row for row in rows if row.variant in names]
    best = fastest(rows).median_ms
    for row in rows:
        low, high = row.quartiles_ms
        bits = "equal"
        if not row.bitwise_equal:
            note = " (same GEMMs: equal)" if row.bitwise_equal_same_gemms else ""
            bits = f"{row.max_difference:.1e}{note}"
        yield (
            f"**{row.variant}**" if row.median_ms == best else row.variant,
            f"{row.median_ms:.1f}", f"{low:.1f}-{high:.1f}", f"{row.exposed_ms:.1f}",
            percent(row.overhead_removed_signed), percent(row.blocked_removed),
            percent(row.of_hideable), f"{row.speedup:.2f}x", f"{row.cpu_ms:.1f}",
            f"{row.blocked_ms:.1f}", bits,
        )  # fmt: skip


def _remarks(rows: Sequence[Result], names: Sequence[str]) -> Iterator[str]:
    """Notes: variants not shown, tuning choices, and variants slower than the reference."""
    if len(names) < len(rows):
        yield f"{len(rows) - len(names)} more variants were measured; --all shows them.\n"
    for row in rows:
        if row.chosen:
            yield f"Chosen by {row.variant}: {'; '.join(row.chosen)}.\n"
    (reference,) = (row for row in rows if row.variant == REFERENCE)
    slower = [
        f"{row.variant} ({percent(1 / row.speedup - 1)})"
        for row in rows
        if row.quartiles_ms[0] > reference.quartiles_ms[1]
    ]
    if slower:
        yield f"Slower than {REFERENCE}, beyond both quartiles: {', '.join(slower)}."


def _lines(fact: Any) -> list[str]:
    """A fact about the machine as one or several lines."""
    return [*map(str, fact)] if isinstance(fact, list) else [str(fact)]
