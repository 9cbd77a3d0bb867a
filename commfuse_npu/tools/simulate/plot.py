"""The pictures of a sweep: bars at one point, lines over what varies, and where a step's time goes.

Ideal bounds are in them, and named so; what is far off the rest is left out, with a note.
"""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.tools.report.charts import Bar, Line, Parts, Picture, bars, lines, parts
from commfuse_npu.tools.simulate.report import ranged, rows_of
from commfuse_npu.tools.simulate.standing import Standing, outcome, seconds
from commfuse_npu.tools.simulate.sweep import Outcome, Point
from commfuse_npu.tools.simulate.variants import REFERENCE

__all__ = ["pictures"]

_FAR = 1.6
"""A step of so many times the one that is compared with would flatten everything else."""
_COLORS = {"ours": "blue", "today": "orange", "rival": "green", "bound": "purple", "plain": "grey"}
_NAMES = {"bound": " (ideal bound)"}


def pictures(points: Sequence[Point], standing: Standing, names: Sequence[str]) -> list[Picture]:
    """Bars and parts of the step at one point; lines over sequence length or NPUs at several."""
    if len(points) == 1:
        return [_bars(points[0], standing, names), _parts(points[0], standing, names)]
    return [
        _lines(points, standing, names),
        _parts(points[-1], standing, names),
    ]


def _named(name: str, standing: Standing) -> str:
    return name + _NAMES.get(standing.roles[name], "")


def _bars(point: Point, standing: Standing, names: Sequence[str]) -> Picture:
    compared = outcome(point, standing.today or REFERENCE.name).step.typical
    rows = rows_of(point, standing, names)
    near = [one for one in rows if one.step.typical <= _FAR * compared]
    shown = [
        Bar(
            one.variant,
            one.step.typical,
            one.step.low,
            one.step.high,
            f"{_named(one.variant, standing)}: {ranged(one.step, seconds)}",
            _COLORS[standing.roles[one.variant]],
        )
        for one in near
    ]
    line = ("Megatron's order", compared) if standing.today else None
    title = "Time of a step, with the range over the machine's uncertainty"
    far = [one for one in rows if one not in near]
    return bars(title, "seconds, lower is better", shown, line, _left_out(far, compared))


def _left_out(far: Sequence[Outcome], compared: float) -> str:
    said = ", ".join(f"{one.variant} {one.step.typical / compared:.1f} times" for one in far)
    return f"Not drawn: {said} the line." if far else ""


def _parts(point: Point, standing: Standing, names: Sequence[str]) -> Picture:
    """What of a step computes, what of it hides transfers, and what is exposed, as a stack.

    Exposed is what a step takes longer than without any transfers, what cutting costs included;
    hidden is what is exposed in plain collectives and not here.
    """
    plain = outcome(point, REFERENCE.name)
    shown = []
    for one in rows_of(point, standing, names):
        step, exposed = one.step.typical, one.exposed.typical
        if step > _FAR * plain.step.typical:
            continue
        hidden = min(max(0.0, plain.exposed.typical - exposed), step - exposed)
        said = f"{_named(one.variant, standing)}: exposed {seconds(exposed)} of {seconds(step)}"
        shown.append(Parts(one.variant, step - exposed - hidden, hidden, exposed, said))
    title = f"Where the time of a step goes, {point.sequence} tokens, {point.npus} NPUs"
    return parts(title, "seconds, lower is better", shown)


def _lines(points: Sequence[Point], standing: Standing, names: Sequence[str]) -> Picture:
    """A line for each variant over what varies; those that are far off are named instead."""
    base = standing.today or REFERENCE.name
    reference = "Megatron's order" if standing.today else base
    npus = len({point.npus for point in points}) > 1
    lengths = len({point.sequence for point in points}) > 1
    axis = "NPUs" if npus and not lengths else "tokens of a sequence"
    if npus and lengths:
        axis = "NPUs, tokens of a sequence"

    def at(point: Point) -> str:
        if npus and lengths:
            return f"{point.npus}, {_k(point.sequence)}"
        return str(point.npus) if npus else _k(point.sequence)

    shown, far = [], []
    for name in (name for name in names if name != standing.today):
        found = [
            (at(point), outcome(point, name).step.typical / outcome(point, base).step.typical)
            for point in points
        ]
        kept = tuple((x, value) for x, value in found if value <= _FAR)
        if len(kept) < len(found):
            far.append(name if not kept else f"{name} in part")
        if kept:
            shown.append(Line(_named(name, standing), kept, standing.roles[name] == "ours"))
    note = f"Far off, not drawn: {', '.join(far)}." if far else ""
    title = f"Time of a step, {reference} = 1, lower is better"
    return lines(title, axis, shown, line=(reference, 1.0), note=note)


def _k(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
