"""What ``measure`` shows: what was measured beside what is described, and the times themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from commfuse_npu.tools.measure.figures import Measured, quartiles
from commfuse_npu.tools.measure.steps import STEPS
from commfuse_npu.tools.report.charts import Line, Picture, lines
from commfuse_npu.tools.report.page import Section, environment, write_page
from commfuse_npu.tools.report.table import Table
from commfuse_npu.tools.simulate.hardware import Figure, Hardware

__all__ = ["compared", "measured_page"]


def compared(measured: Hardware, described: Hardware) -> list[tuple[str, str, str, str]]:
    """Each figure that was measured: its name, its range, the described range, where it lies."""
    rows = []
    for name, figure in measured.figures.items():
        other = described.figures[name]
        if figure == other:
            continue
        at = "in the range"
        if figure.typical < other.low:
            at = "**below**"
        elif figure.typical > other.high:
            at = "**above**"
        rows.append((name, _range(figure), _range(other), at))
    return rows


def _range(figure: Figure) -> str:
    return f"{figure.typical:.4g} ({figure.low:.4g} to {figure.high:.4g})"


def measured_page(
    path: Path,
    command: Sequence[str],
    facts: Mapping[str, Any],
    measured: Measured,
    failed: Mapping[str, str],
    figures: Sequence[tuple[str, str, str, str]],
    described: str,
    said: Sequence[str],
) -> None:
    """Write the page.

    Args:
        failed: why, by step.
        figures: from :func:`compared`.
        described: the file that ``simulate --hardware`` takes.
        said: of the forms of a layer, by the benchmark.
    """
    outside = [row[0] for row in figures if row[3] != "in the range"]
    verdict = [
        *said,
        f"{len(figures)} figures were measured, {len(outside)} of them outside of the range that "
        f"was assumed{': ' if outside else ''}{', '.join(f'`{name}`' for name in outside)}.",
        f"What they say of a training: `commfuse-npu simulate --hardware {described}`",
    ]
    if failed:
        verdict.append(f"**Not measured**: {', '.join(failed)}.")
    head = "figure", "measured (quartiles)", "described", "lies"
    sections = [
        Section("Figures", tables=(Table(head, tuple(figures), "In SI units"),)),
    ]
    for step in STEPS:
        if step.name in failed:
            sections.append(Section(step.name, (f"Failed: {failed[step.name]}",)))
        elif step.name in measured:
            times, title = measured[step.name], step.question[0].upper() + step.question[1:]
            drawn = _picture(step.name, times)
            said = () if drawn is None else (drawn.title,)
            sections.append(Section(title, said, drawn, (_table(times),)))
    about = {key: str(value) for key, value in facts.items() if value not in ([], None)}
    write_page(path, "Measured figures", verdict, sections, environment(command) | about)


def _picture(step: str, times: Sequence[Mapping[str, Any]]) -> Picture | None:
    if step == "gemms":
        layers = dict.fromkeys(one["layer"] for one in times)
        return lines(
            "GFLOP/s of a GEMM, higher is better",
            "rows",
            [Line(layer, tuple(_rate(one) for one in reversed(times) if one["layer"] == layer))
             for layer in layers],
        )  # fmt: skip
    if step == "links":
        counts = sorted({one["lanes"] for one in times})
        return lines(
            "MB/s of each lane, one way, higher is better",
            "bytes of a message",
            [
                Line(
                    f"{count} at once",
                    tuple(
                        (str(one["bytes"]), one["bytes"] / median(one["seconds"]) / 1e6)
                        for one in times
                        if one["lanes"] == count and not one.get("half a ping-pong")
                    ),
                )
                for count in counts
            ],
        )
    return None


def _rate(one: Mapping[str, Any]) -> tuple[str, float]:
    operations = 2.0 * one["rows"] * one["inputs"] * one["outputs"]
    return str(one["rows"]), operations / median(one["seconds"]) / 1e9


def _table(times: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for one in times for name in one if name != "seconds"))
    rows = []
    for one in times:
        low, middle, high = (f"{1e6 * value:.1f}" for value in quartiles(one["seconds"]))
        rows.append((*(_said(one.get(name)) for name in names), middle, f"{low} to {high}"))
    return Table((*names, "us", "quartiles"), tuple(rows), "Single calls", folded=True)


def _said(value: Any) -> str:
    return {None: "", True: "yes", False: "no"}.get(value, str(value))
