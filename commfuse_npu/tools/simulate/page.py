"""What ``simulate --html`` and ``plan --html`` write: pictures, tables, and a layer's Gantt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.report.charts import Bar, Picture, Row, Table, bars, gantt
from commfuse_npu.tools.report.page import Section, environment, write_page
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.plot import pictures
from commfuse_npu.tools.simulate.recommend import Recommendation
from commfuse_npu.tools.simulate.recommendation_report import COLUMNS as COLUMNS_OF_PLAN
from commfuse_npu.tools.simulate.recommendation_report import fitting, layouts, reasons
from commfuse_npu.tools.simulate.report import COLUMNS, cells, headline, ratio
from commfuse_npu.tools.simulate.standing import Standing
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.sweep import Point
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant

__all__ = ["layer", "layer_picture", "plan_page", "plan_pictures", "sources", "sweep_page"]

_TITLE = "One layer of one micro-batch, forward then backward"
_GANTT = (
    "Of the rank in the middle of the tensor-parallel group. Red is where its compute engine "
    "waits, in ms; hover over a bar for its name. Transfers to several peers at once are one bar. "
    "Forward-backward overlap has the layer of a forward beside that of a backward."
)


def layer(step: Step, shown: Sequence[tuple[str, Variant]]) -> list[Row]:
    """Each of the variants as lanes over time."""
    return [lanes(said, step.parts(one)) for said, one in shown]


def layer_picture(rows: Sequence[Row]) -> Picture:
    """The Gantt of these rows."""
    return gantt(_TITLE, "ms, typical figures; lower is better", rows)


def plan_pictures(found: Recommendation, hardware: Hardware) -> list[Picture]:
    """The candidates as bars, and a layer of the best one's layout, if anything is sent there."""
    shown = []
    for number, (place, one, row) in enumerate(layouts(found, hardware)):
        times = found.steps.get(one, (one.seconds,))
        layout = f"TP {row[1]}, CP {row[2]}, PP {row[3]}, DP {row[4]}, {one.variant.name}"
        said = f"{place}: {layout}, {row[7]}"
        tint = "purple" if one is found.bound else "orange" if one in found.rivals else "blue"
        # Two of them may have the same layout.
        name = f"{number + 1}. {place}: {layout}"
        shown.append(Bar(name, one.seconds, min(times), max(times), said, tint))
    line = ("the best without CommFuse", found.other.seconds)
    title = "Time of a step, the best layouts"
    drawn = [
        bars(title, "seconds, lower is better; ranges of those that are compared", shown, line)
    ]
    best = found.best
    if best.layout.tp > 1:
        step = Step(hardware.machine(), best.training)
        every = dict.fromkeys((REFERENCE, Variant("megatron", "megatron"), best.variant))
        drawn.append(layer_picture(layer(step, [(one.name, one) for one in every])))
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
    first, _, *why = reasons(found)
    head = ("place", *COLUMNS_OF_PLAN[1:])
    table = Table(head, tuple(cells for _, _, cells in layouts(found, hardware)), "layouts")
    said = [f"**{first}**", *(line.strip().removeprefix("- ") for line in why)]
    drawn = plan_pictures(found, hardware)
    notes = sources(hardware), fitting(found, hardware)
    sections = [Section(drawn[0].title, notes, drawn[0], (table,))]
    sections += [Section(one.title, (_GANTT,), one) for one in drawn[1:]]
    options = tuple(f"{name} `{line}`" for name, line in launches.items())
    write_page(path, title, said, [Section("Launch", options), *sections], _facts(words, hardware))


def sources(hardware: Hardware) -> str:
    """How far to believe it."""
    return (
        f"Simulated, not measured. {hardware.assumed} of {hardware.path.name} have no public "
        "source at all; ranges are over its uncertainty."
    )


def sweep_page(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    points: Sequence[Point],
    standing: Standing,
    names: Sequence[str],
    said: Sequence[str],
    rows: Sequence[Row],
) -> None:
    """Write the page of ``simulate``.

    Args:
        words: the command.
        names: of the variants that are shown.
        said: the verdict.
        rows: of the Gantt, see :func:`layer`.
    """
    tables = [
        Table(COLUMNS, tuple(cells(point, standing, names)), headline(point)) for point in points
    ]
    drawn = pictures(points, standing, names)
    texts = {
        0: (sources(hardware), *([ratio(points[0])] if len(points) == 1 else [])),
        len(drawn) - 1: (
            "Exposed is what a step takes longer than without any transfers, with what cutting "
            "GEMMs costs; hidden is what plain collectives leave exposed and this variant does "
            "not.",
        ),
    }
    sections = [
        Section(picture.title, texts.get(at, ()), picture, () if at else tuple(tables))
        for at, picture in enumerate(drawn)
    ]
    if rows:
        sections.append(Section(_TITLE, (_GANTT,), layer_picture(rows)))
    write_page(path, title, said, sections, _facts(words, hardware))


def _facts(words: Sequence[str], hardware: Hardware) -> dict[str, str]:
    return environment(words) | {"machine simulated": f"{hardware.name} ({hardware.path.name})"}
