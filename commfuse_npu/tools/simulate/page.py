"""What ``simulate`` and ``plan`` draw: pictures, alone or in a page with verdict and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.report.charts import Bar, Line, Picture, Table, bars, gantt, lines
from commfuse_npu.tools.report.page import Section, environment, write_page
from commfuse_npu.tools.simulate import recommendation_report as plan_report
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.recommend import Recommendation
from commfuse_npu.tools.simulate.report import COLUMNS, cells, headline, seconds, sources
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.sweep import Point
from commfuse_npu.tools.simulate.variants import MEGATRON, REFERENCE, Role, Variant

__all__ = ["layer_picture", "plan_page", "plan_pictures", "sweep_page", "sweep_picture"]

_COLORS: dict[Role, str] = {"ours": "blue", "today": "orange", "rival": "green", "bound": "purple",
                            "plain": "grey"}  # fmt: skip
_GANTT = (
    "Of the rank in the middle of the tensor-parallel group. Red is where its compute engine "
    "waits, in ms; hover over a bar for its name. Transfers to several peers at once are one bar. "
    "Forward-backward overlap has the layer of a forward beside that of a backward."
)


def layer_picture(step: Step, shown: Mapping[str, Variant]) -> Picture:
    """The Gantt of one layer in each of these variants."""
    rows = [lanes(name, step.parts(one)) for name, one in shown.items()]
    title = "One layer of one micro-batch, forward then backward"
    return gantt(title, "ms, typical figures; lower is better", rows)


def sweep_picture(points: Sequence[Point], shown: Sequence[Variant]) -> Picture:
    """Bars at one point; at several a line for each variant over sequence length or NPUs."""
    base = MEGATRON if MEGATRON in shown else REFERENCE
    against = "Megatron's order" if base is MEGATRON else base.name
    names = {one: one.name + " (ideal bound)" * (one.role == "bound") for one in shown}
    if len(points) == 1:
        steps = {one: points[0].outcomes[one.name].step for one in shown}
        of_bars = [
            Bar(one.name, step.typical, step.low, step.high, f"{names[one]}: {step.shown(seconds)}",
                _COLORS[one.role])
            for one, step in steps.items()
        ]  # fmt: skip
        title = "Time of a step, with the range over the machine's uncertainty"
        line = against, points[0].outcomes[base.name].step.typical
        return bars(title, "seconds, lower is better", of_bars, line)
    axes = {
        "NPUs": [str(point.npus) for point in points],
        "tokens of a sequence": [_thousands(point.sequence) for point in points],
    }
    varying = {axis: labels for axis, labels in axes.items() if len(set(labels)) > 1}
    axis = ", ".join(varying) or "tokens of a sequence"
    labels = [", ".join(at) for at in zip(*(varying or axes).values(), strict=True)]
    of_lines = []
    for one in shown:
        shares = [
            point.outcomes[one.name].step.typical / point.outcomes[base.name].step.typical
            for point in points
        ]
        at = tuple(zip(labels, shares, strict=True))
        if one is not base:
            of_lines.append(Line(names[one], at, one.ours))
    title = f"Time of a step, {against} = 1, lower is better"
    return lines(title, axis, of_lines, line=(against, 1.0))


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def plan_pictures(found: Recommendation, hardware: Hardware) -> list[Picture]:
    """The candidates as bars, and a layer of the best one's layout, if anything is sent there."""
    shown = []
    for number, (one, row) in enumerate(plan_report.layouts(found, hardware), 1):
        times = found.steps.get(one, (one.seconds,))
        layout = f"TP {row[1]}, CP {row[2]}, PP {row[3]}, DP {row[4]}, {one.variant.name}"
        tint = "purple" if one is found.bound else "orange" if one in found.rivals else "blue"
        # Two of them may have the same layout.
        name, said = f"{number}. {row[0]}: {layout}", f"{row[0]}: {layout}, {row[7]}"
        shown.append(Bar(name, one.seconds, min(times), max(times), said, tint))
    axis = "seconds, lower is better; ranges of those that are compared"
    line = "the best without CommFuse", found.other.seconds
    drawn = [bars("Time of a step, the best layouts", axis, shown, line)]
    best = found.best
    if best.training.layout.tp > 1:
        step = Step(hardware.machine(), best.training)
        every = {one.name: one for one in (REFERENCE, MEGATRON, best.variant)}
        drawn.append(layer_picture(step, every))
    return drawn


def plan_page(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    found: Recommendation,
    launches: Mapping[str, str],
) -> None:
    """Write the page of ``plan``.

    Args:
        words: the command.
        launches: commands and options by what they are for.
    """
    rows = tuple(row for _, row in plan_report.layouts(found, hardware))
    first, _, *why = plan_report.reasons(found)
    said = [f"**{first}**", *(line.removeprefix("- ") for line in why)]
    options = tuple(f"{name} `{line}`" for name, line in launches.items())
    _write(
        path,
        title,
        words,
        hardware,
        said,
        plan_pictures(found, hardware),
        [Table(plan_report.COLUMNS, rows, "layouts")],
        plan_report.fitting(found, hardware),
        [Section("Launch", options)],
    )


def sweep_page(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    points: Sequence[Point],
    shown: Sequence[Variant],
    said: Sequence[str],
    drawn: Sequence[Picture],
) -> None:
    """Write the page of ``simulate``.

    Args:
        words: the command.
        shown: the variants that have rows.
        said: the verdict.
        drawn: the steps, and the Gantt of a layer.
    """
    tables = [Table(COLUMNS, tuple(cells(point, shown)), headline(point)) for point in points]
    note = (
        "Exposed is what a step takes longer than without any transfers, with what cutting GEMMs "
        "costs."
    )
    _write(path, title, words, hardware, said, drawn, tables, note, [])


def _write(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    said: Sequence[str],
    drawn: Sequence[Picture],
    tables: Sequence[Table],
    note: str,
    before: Sequence[Section],
) -> None:
    first, *rest = drawn
    sections = [
        *before,
        Section(first.title, (sources(hardware), note), first, tuple(tables)),
        *(Section(one.title, (_GANTT,), one) for one in rest),
    ]
    machine = {"machine simulated": f"{hardware.name} ({hardware.path.name})"}
    write_page(path, title, said, sections, environment(words) | machine)
