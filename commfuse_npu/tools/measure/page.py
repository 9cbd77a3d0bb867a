"""What ``measure`` shows: what was measured beside what is described, and the times themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commfuse_npu.tools.bench.variants import is_ours
from commfuse_npu.tools.measure.figures import Measured, quartiles
from commfuse_npu.tools.measure.layer import RATIO
from commfuse_npu.tools.measure.steps import STEPS
from commfuse_npu.tools.measure.trainings import Training
from commfuse_npu.tools.measure.verdict import iterations, picture, table, verdict
from commfuse_npu.tools.report.charts import Bar, Line, Picture, Table, bars, lines
from commfuse_npu.tools.report.page import Section, environment, write_page
from commfuse_npu.tools.simulate.hardware import Figure, Hardware

__all__ = ["Shown", "compared", "measured_page", "verdict_lines"]

_SAID = 12
"""Lines of a failure; its file has the rest."""


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


@dataclass(frozen=True)
class Shown:
    """What a page shows.

    Attributes:
        facts: of the machine.
        measured: the times, by step.
        failed: why, by step.
        figures: from :func:`compared`.
        described: the file that ``simulate --hardware`` takes; ``None`` without figures.
        said: of the forms of a layer, by the benchmark.
        trainings: of the launch, if it was asked for.
        device: that was measured.
    """

    facts: Mapping[str, Any]
    measured: Measured
    failed: Mapping[str, str]
    figures: Sequence[tuple[str, str, str, str]]
    described: Path | None
    said: Sequence[str]
    trainings: Sequence[Training]
    device: str


def measured_page(path: Path, command: Sequence[str], shown: Shown) -> None:
    """Write the page."""
    sections = [*_launch(shown.trainings), *_figures(shown)]
    about = {key: str(value) for key, value in shown.facts.items() if value not in ([], None)}
    facts = environment(command) | about
    write_page(path, "Measured", verdict_lines(shown), sections, facts)


def verdict_lines(shown: Shown) -> list[str]:
    """What the page begins with, as in Markdown."""
    lines = verdict(shown.trainings, shown.device)
    if not shown.trainings:
        lines.append("No launch was trained: `--launch COMMAND` does.")
    lines += [f"Two layers: {line}" for line in shown.said]
    if shown.described is not None:
        outside = [row[0] for row in shown.figures if row[3] != "in the range"]
        names = f": {', '.join(f'`{name}`' for name in outside)}" if outside else ""
        lines += [
            f"{len(shown.figures)} figures were measured, {len(outside)} of them outside of the "
            f"range that was assumed{names}.",
            f"What they say of a training: `commfuse-npu simulate --hardware {shown.described}`",
        ]
    if shown.failed:
        lines.append(f"**Not measured**: {', '.join(shown.failed)}.")
    return lines


def _launch(trainings: Sequence[Training]) -> Iterator[Section]:
    ran = [one for one in trainings if one.log is not None]
    if ran:
        yield Section("The launch, in each form", (), picture(ran), (table(ran), *iterations(ran)))
    for one in trainings:
        if one.log is None:
            why, *said = one.failed.splitlines()
            quoted = (f"`{line}`" for line in said[-_SAID:])
            yield Section(f"{one.form.title}: failed", (why, *quoted))


def _figures(shown: Shown) -> Iterator[Section]:
    if shown.figures:
        head = "figure", "measured (quartiles)", "described", "lies"
        yield Section("Figures", tables=(Table(head, tuple(shown.figures), "In SI units"),))
    for step in STEPS:
        if step.name in shown.failed:
            yield Section(step.name, (f"Failed: {shown.failed[step.name]}",))
        elif step.name in shown.measured:
            times, title = shown.measured[step.name], step.question[0].upper() + step.question[1:]
            drawn = _picture(step.name, times)
            said = () if drawn is None else (drawn.title,)
            yield Section(title, said, drawn, (_table(times),))


def _picture(step: str, times: Sequence[Mapping[str, Any]]) -> Picture | None:
    if step == "layer" and RATIO in times[0]:
        return _layer_by_ratio(times)
    if step == "layer":
        return _forms_of_a_layer(times)
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


def _forms_of_a_layer(times: Sequence[Mapping[str, Any]]) -> Picture:
    shown, today = [], None
    for one in times:
        low, middle, high = (1e3 * value for value in one["seconds"])
        tint = "blue" if is_ours(one["form"]) else "grey"
        if one["form"] == "megatron":
            tint, today = "orange", ("Megatron's order", middle)
        said = f"{one['form']}: {middle:.1f} ms{', disturbed' if one['disturbed'] else ''}"
        shown.append(Bar(one["form"], middle, low, high, said, tint))
    axis = "ms, median and quartiles, lower is better"
    return bars("Time of two layers, forward and backward", axis, shown, today)


def _layer_by_ratio(times: Sequence[Mapping[str, Any]]) -> Picture:
    """Of one rank alone, whose links have the rates that they are given: who matters."""
    of: dict[str, list[tuple[str, float]]] = {}
    for one in times:
        of.setdefault(one["form"], []).append((f"{one[RATIO]:g}", 1e3 * median(one["seconds"])))

    def fastest(forms: Iterable[str]) -> list[str]:
        return sorted(forms, key=lambda form: sum(ms for _, ms in of[form]))[:2]

    compared = [form for form in ("collective", "megatron") if form in of]
    rivals = fastest(form for form in of if not is_ours(form) and form not in compared)
    ours = fastest(form for form in of if is_ours(form))
    return lines(
        "ms of two layers, forward and backward, the fastest forms, lower is better",
        RATIO,
        [Line(form, tuple(of[form])) for form in (*compared, *rivals, *ours)],
    )


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
    return {"None": "", "True": "yes", "False": "no"}.get(str(value), str(value))  # 1 is no True
