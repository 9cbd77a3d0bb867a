"""Pages of ``simulate`` and ``plan``: pictures, verdict and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from commfuse_npu.config_file import ConfigError
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.report.charts import (
    Bar,
    Line,
    Picture,
    Table,
    bars,
    gantt,
    heat,
    lines,
    stacks,
)
from commfuse_npu.tools.report.page import Section, environment, write_page
from commfuse_npu.tools.simulate import recommendation_report as plan_report
from commfuse_npu.tools.simulate.footprint import Footprint, footprint, limit
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.recommend import Recommendation
from commfuse_npu.tools.simulate.report import COLUMNS, Standing, cells, headline, seconds, sources
from commfuse_npu.tools.simulate.step import Layout, Step, Training
from commfuse_npu.tools.simulate.sweep import Options, Point, training
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, MEGATRON, REFERENCE, Role, Variant

__all__ = ["gain_picture", "layer_picture", "plan_page", "sweep_page", "sweep_picture"]

_COLORS: dict[Role, str] = {"ours": "blue", "today": "orange", "rival": "green", "bound": "purple",
                            "plain": "grey"}  # fmt: skip
_GANTT = (
    "Of the rank in the middle of the tensor-parallel group. Red is where its compute engine "
    "waits, in ms; hover over a bar for its name. Drag to move, hold Ctrl and turn the wheel to "
    "zoom in and out. Transfers to several peers at once are one bar. "
    "Forward-backward overlap has the layer of a forward beside that of a backward."
)
_SIZES, _LENGTHS = (2, 4, 8), (4096, 8192, 16384, 32768)


def layer_picture(step: Step, variants: Mapping[str, Variant]) -> Picture:
    """A Gantt chart of one layer in each of these variants."""
    rows = [lanes(name, step.parts(variant)) for name, variant in variants.items()]
    title = "One layer of one micro-batch, forward then backward"
    ordered = sorted(rows, key=lambda row: max(bit.end for bit in row.bits))
    answer = f"Shortest: {ordered[0].label}. Longest: {ordered[-1].label}."
    return gantt(title, "ms, typical figures; lower is better", rows)._replace(answer=answer)


def sweep_picture(points: Sequence[Point], variants: Sequence[Variant]) -> Picture:
    """Bars for one point; for several, a line per variant over sequence length or NPUs."""
    base = MEGATRON if MEGATRON in variants else REFERENCE
    against = "Megatron's order" if base is MEGATRON else base.name
    names = {form: form.name + " (ideal bound)" * (form.role == "bound") for form in variants}
    if len(points) == 1:
        steps = {form: points[0].outcomes[form.name].step for form in variants}
        of_bars = [
            Bar(form.name, step.typical, step.low, step.high,
                f"{names[form]}: {step.text(seconds)}", _COLORS[form.role])
            for form, step in steps.items()
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
    labels = [", ".join(parts) for parts in zip(*(varying or axes).values(), strict=True)]
    of_lines = []
    for form in variants:
        shares = [
            point.outcomes[form.name].step.typical / point.outcomes[base.name].step.typical
            for point in points
        ]
        pairs = tuple(zip(labels, shares, strict=True))
        if form is not base:
            of_lines.append(Line(names[form], pairs, form.ours))
    title = f"Time of a step, {against} = 1, lower is better"
    return lines(title, axis, of_lines, line=(against, 1.0))


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def gain_picture(model: ModelConfig, hardware: Hardware) -> Picture:
    """Time that forward-backward overlap saves per layer, in %, by TP and sequence length."""
    gains = []
    sizes = [tp for tp in _SIZES if tp <= hardware.npus_per_node]
    for tp, length in product(sizes, _LENGTHS):
        try:
            options = Options(micro_batch=1, micro_batches=1)
            step = Step(hardware.machine(), training(model, Layout(tp, 1, 1, 1), length, options))
        except ConfigError:
            continue  # heads or widths that this TP does not divide
        ours, today = (step.layer_time(variant).seconds for variant in (FB_OVERLAP, MEGATRON))
        gains.append((_thousands(length), f"TP {tp}", 100 * (1 - ours / today)))
    title = "% less time per layer than in Megatron's order, with --commfuse-fb-overlap"
    picture = heat(title, "tokens of a sequence", gains)
    if len(gains) < 2:
        return picture._replace(note="This model has no layer that can be simulated by itself.")
    least, *_, most = sorted(gains, key=lambda cell: cell[2])
    extremes = (f"{cell[2]:.1f} % at {cell[1]}, {cell[0]} tokens" for cell in (least, most))
    why = "; 0 where the host takes longer than the device" if least[2] < 0.05 else ""
    return picture._replace(answer=f"From {' to '.join(extremes)}{why}.")


def _memory_picture(footprints: Mapping[str, Footprint], hardware: Hardware) -> Picture:
    """Memory of the fullest NPU by purpose, and the memory that is available to tensors."""
    usable = limit(hardware) / 2**30
    rows = [
        (f"{name}, {memory.total / 2**30:.1f} GiB", {part: size / 2**30 for part, size in parts})
        for name, memory in footprints.items()
        for parts in [memory._asdict().items()]
    ]
    name = max(footprints, key=lambda name: footprints[name].total).replace(";", ",")
    most = max(memory.total for memory in footprints.values()) / 2**30
    line = f"usable: {usable:.1f} GiB", usable
    picture = stacks("Memory of the fullest NPU", "GiB", rows, line)
    answer = f"The most: {name}, {most:.1f} GiB of {usable:.1f} GiB that tensors may take."
    return picture._replace(answer=answer)


def plan_page(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    recommendation: Recommendation,
    launches: Mapping[str, str],
) -> None:
    """Write the page of ``plan``.

    Args:
        words: the command line.
        launches: commands and options, by purpose.
    """
    bar, memory = [], {}
    for plan, row in plan_report.layouts(recommendation, hardware):
        times = recommendation.steps.get(plan, (plan.seconds,))
        layout = f"{row[0]}: TP {row[1]}, CP {row[2]}, PP {row[3]}, DP {row[4]}"
        rival = plan in recommendation.rivals
        tint = "purple" if plan is recommendation.bound else "orange" if rival else "blue"
        label = f"{layout}; {plan.variant.name}, {row[7]}"
        bar.append(Bar(label, plan.seconds, min(times), max(times), label, tint))
        memory[f"{layout}; {plan.variant.name}"] = plan.memory
    recommended, _, *why = (line.removeprefix("- ") for line in plan_report.reasons(recommendation))

    def answering(picture: Picture, begin: str) -> Picture:
        """Move the reason that starts with ``begin`` from the list to this picture."""
        answer = next((why.pop(i) for i, line in enumerate(why) if line.startswith(begin)), "")
        return picture._replace(answer=answer or picture.answer)

    line = "the best without CommFuse", recommendation.other.seconds
    steps = bars("Time of a step, the best layouts", "seconds, lower is better", bar, line)
    best, pictures = recommendation.best, [answering(steps, "Without CommFuse")]
    pictures.append(gain_picture(best.training.model, hardware))
    if best.training.layout.tp > 1:
        step = Step(hardware.machine(), best.training)
        variants = {variant.name: variant for variant in (REFERENCE, MEGATRON, best.variant)}
        pictures.append(answering(layer_picture(step, variants), "Plain transfers"))
    pictures.append(_memory_picture(memory, hardware))
    layouts = tuple(row for _, row in plan_report.layouts(recommendation, hardware))
    options = tuple(f"{name} `{line}`" for name, line in launches.items())
    _write(
        path,
        title,
        words,
        hardware,
        [f"**{recommended}**", *why],
        pictures,
        [Table(plan_report.COLUMNS, layouts, "layouts")],
        plan_report.fitting(recommendation, hardware),
        [Section("Launch", options)],
    )


def sweep_page(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    standing: Standing,
    variants: Sequence[Variant],
    verdict: Sequence[str],
    setup: Training,
) -> None:
    """Write the page of ``simulate``.

    Args:
        words: the command line.
        variants: those in the tables.
        verdict: the best variant, and its comparison with others.
        setup: the training at the first point.
    """
    points, compared = standing.points, standing.compared
    memory = {name: footprint(setup, variant, hardware) for name, variant in compared.items()}
    pictures = [
        sweep_picture(points, variants)._replace(answer=verdict[1]),
        gain_picture(setup.model, hardware),
        layer_picture(Step(hardware.machine(), setup), compared),
        _memory_picture(memory, hardware),
    ]
    tables = [Table(COLUMNS, tuple(cells(point, variants)), headline(point)) for point in points]
    note = (
        "Exposed is what a step takes longer than without any transfers, with what cutting GEMMs "
        "costs."
    )
    _write(path, title, words, hardware, verdict[:1], pictures, tables, note, [])


def _write(
    path: Path,
    title: str,
    words: Sequence[str],
    hardware: Hardware,
    verdict: Sequence[str],
    pictures: Sequence[Picture],
    tables: Sequence[Table],
    note: str,
    before: Sequence[Section],
) -> None:
    first, *rest = pictures
    sections = [
        *before,
        Section(first.title, (sources(hardware), note), first, tuple(tables)),
        *(
            Section(plot.title, (_GANTT,) * plot.title.startswith("One layer"), plot)
            for plot in rest
        ),
    ]
    machine = {"machine simulated": f"{hardware.name} ({hardware.path.name})"}
    write_page(path, title, verdict, sections, environment(words) | machine)
