"""The pictures, as specifications in Vega-Lite.

Each is one view, so that it takes the width that a page has; names stand above what they name, and
not beside it, so that they are whole on a telephone, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from commfuse_npu.tools.report.drawing import Chart
from commfuse_npu.tools.report.palette import color, looks
from commfuse_npu.tools.report.table import Table

__all__ = ["Bar", "Bit", "Line", "Parts", "Picture", "Row", "bars", "gantt", "lines", "parts"]

_ROW = 46
"""Pixels of a bar with its name."""
_LANE = 24
"""Of a lane of a Gantt."""
_MARKED, _FEW = 40, 8
"""Points of a line that has marks, and figures of an axis that are named each."""
_SHORT = (
    "datum.value == 0 ? '0' : abs(datum.value) < 1e-3 ? format(datum.value, '.1e') : datum.label"
)
"""The figures of an axis, in as many characters as they need."""
_LABELS = 66
"""Pixels of the names of lanes."""
_TICKS: Chart = {"tickCount": {"expr": "ceil(width / 90)"}}


class Picture(NamedTuple):
    """A chart, and the same numbers as tables."""

    title: str
    chart: Chart
    tables: tuple[Table, ...]
    note: str = ""
    """What is not drawn, and why."""


class Bar(NamedTuple):
    """A figure, the least and the most that it may be, and the name of a colour."""

    name: str
    value: float
    low: float
    high: float
    said: str
    color: str = "grey"


class Parts(NamedTuple):
    """A time, in parts that follow each other: computing alone, beside transfers, and exposed."""

    name: str
    alone: float
    hidden: float
    exposed: float
    said: str


class Line(NamedTuple):
    """A variant over something: pairs of a label or a number and a figure."""

    name: str
    points: tuple[tuple[str | float, float], ...]
    ours: bool = False


class Bit(NamedTuple):
    """Something on a lane of a Gantt, in ms; ``kind``: ``work``, ``transfer`` or ``waiting``."""

    lane: str
    name: str
    start: float
    end: float
    kind: str


class Row(NamedTuple):
    """One variant of a Gantt: what is said above its lanes, and what is on them."""

    said: str
    lanes: tuple[str, ...]
    bits: tuple[Bit, ...]


def bars(
    title: str,
    axis: str,
    shown: Sequence[Bar],
    line: tuple[str, float] | None,
    note: str = "",
) -> Picture:
    """A bar for each, with its range as whiskers, and a line across all to compare with."""
    order = [bar.name for bar in shown]
    rows = [bar._asdict() | {"color": color(bar.color)} for bar in shown]
    y = {"field": "name", "type": "nominal", "sort": order, "axis": None,
         "scale": {"domain": order}}  # fmt: skip
    x = _quantity("value", axis) | {"scale": {"zero": True, "nice": False}}
    x["axis"] = _TICKS | {"grid": False}
    ranged = [{"filter": "datum.low < datum.high"}]
    whisker = {"type": "rule", "strokeWidth": 1.5, "color": color("ink"), "yOffset": 10}
    end = {"type": "tick", "thickness": 1.5, "size": 9, "color": color("ink"), "yOffset": 10}
    whiskers: list[Chart] = [
        {"transform": ranged, "mark": whisker,
         "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}}},
        *({"transform": ranged, "mark": end,
           "encoding": {"x": {"field": at, "type": "quantitative"}}} for at in ("low", "high")),
    ]  # fmt: skip
    tip = [{"field": "name", "title": "variant"}, {"field": "said", "title": "figure"}]
    layer: list[Chart] = [
        {"mark": {"type": "bar", "height": 14, "yOffset": 10},
         "encoding": {"x": x, "color": {"field": "color", "scale": None}, "tooltip": tip}},
        *(whiskers if any(bar.low < bar.high for bar in shown) else []),
        *([] if line is None else [_reference(line, vertical=True)]),
        _name_above(),
    ]  # fmt: skip
    said = "; ".join(bar.said for bar in shown)
    chart = {
        "description": f"Bars. {axis}. {said}. {note}",
        "height": _ROW * len(shown),
        "data": {"values": rows},
        "encoding": {"y": y},
        "layer": layer,
    }
    cells = tuple((b.name, *map(_number, (b.value, b.low, b.high))) for b in shown)
    head = "variant", "typical", "least", "most"
    table = Table(head, cells, f"{title}: {axis}", folded=True)
    return Picture(title, chart, (table,), note)


def parts(title: str, axis: str, shown: Sequence[Parts]) -> Picture:
    """A stacked bar for each."""
    order = [one.name for one in shown]
    kinds = ("computing alone", "computing, transfers hidden behind it", "exposed")
    rows = [
        {"name": one.name, "said": one.said, "part": kind, "place": place, "value": value}
        for one in shown
        for place, (kind, value) in enumerate(
            zip(kinds, (one.alone, one.hidden, one.exposed), strict=True)
        )
    ]
    tints = [color(name) for name in ("blue", "pale", "red")]
    tip = [{"field": "name", "title": "variant"}, {"field": "part"},
           {"field": "value", "format": ".2f", "title": axis}]  # fmt: skip
    fill = {"field": "part", "type": "nominal", "scale": {"domain": kinds, "range": tints},
            "legend": {"columns": {"expr": "width > 600 ? 3 : 1"}}}  # fmt: skip
    x = _quantity("value", axis) | {"scale": {"nice": False}, "axis": _TICKS | {"grid": False}}
    layer = [
        {"mark": {"type": "bar", "height": 14, "yOffset": 10},
         "encoding": {"x": x, "color": fill,
                      "order": {"field": "place"}, "tooltip": tip}},
        _name_above() | {"transform": [{"filter": "datum.place == 0"}]},
    ]  # fmt: skip
    y = {"field": "name", "type": "nominal", "sort": order, "axis": None,
         "scale": {"domain": order}}  # fmt: skip
    chart = {
        "description": f"Stacked bars. {axis}. " + "; ".join(o.said for o in shown),
        "height": _ROW * len(shown),
        "data": {"values": rows},
        "encoding": {"y": y},
        "layer": layer,
    }
    cells = tuple((o.name, *map(_number, (o.alone, o.hidden, o.exposed))) for o in shown)
    table = Table(("variant", *kinds), cells, f"{title}: {axis}", folded=True)
    return Picture(title, chart, (table,))


def lines(
    title: str,
    axis: str,
    shown: Sequence[Line],
    *,
    line: tuple[str, float] | None = None,
    whole: bool = False,
    note: str = "",
    height: int = 300,
    show: Callable[[float], str] = "{:.4g}".format,
) -> Picture:
    """A line for each over what varies.

    Args:
        title: with what is drawn upwards, which so can be read without turning.
        axis: what varies.
        line: a name and a figure to compare with, across the picture.
        whole: whether what varies is counted: ticks are whole numbers.
        show: how a figure is written in the table.
    """
    names = [one.name for one in shown]
    chosen = looks(names, [one.name for one in shown if one.ours])
    steps = list(dict.fromkeys(at for one in shown for at, _ in one.points))
    numbers = all(not isinstance(at, str) for at in steps)
    rows = [
        {
            "name": one.name,
            "dash": list(chosen[one.name].dash),
            "at": at,
            "value": value,
            "marked": len(one.points) <= _MARKED,
        }
        for one in shown
        for at, value in one.points
    ]
    of = [chosen[name] for name in names]
    # One legend of colours and shapes, which Vega makes where domains are equal.
    legend = {"columns": {"expr": "width > 600 ? 3 : 1"}, "symbolSize": 120}
    hue = {"field": "name", "type": "nominal", "legend": legend,
           "scale": {"domain": names, "range": [color(look.color) for look in of]}}  # fmt: skip
    # Without a scale, or its legend is drawn into the one of the marks.
    dash = {"field": "dash", "type": "nominal", "scale": None}
    shape = {"field": "name", "type": "nominal", "legend": legend,
             "scale": {"domain": names, "range": [look.shape for look in of]}}  # fmt: skip
    ticks: Chart = _TICKS | {"grid": False}
    if whole:
        ticks |= {"tickMinStep": 1, "format": "d"}
    if len(steps) <= _FEW:
        ticks |= {"values": steps, "format": "d" if whole else ".4~g"}
    x: Chart = {"field": "at", "title": axis, "type": "ordinal", "sort": steps,
                "axis": {"labelAngle": 0, "labelOverlap": True}}  # fmt: skip
    if numbers:
        x = {"field": "at", "title": axis, "type": "quantitative", "axis": ticks,
             "scale": {"zero": False, "nice": False, "padding": 8}}  # fmt: skip
    tip = [{"field": "name", "title": "variant"}, {"field": "at", "title": axis},
           {"field": "value", "title": "figure", "format": ".4~g"}]  # fmt: skip
    y = {"field": "value", "type": "quantitative", "title": None,
         "axis": {"labelExpr": _SHORT}, "scale": {"zero": False, "padding": 8}}  # fmt: skip
    base = {"x": x, "y": y, "color": hue}
    # Of many points the marks are not seen, but found by the mouse.
    seen = {"condition": {"test": "datum.marked", "value": 1}, "value": 0}
    layer: list[Chart] = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": base | {"strokeDash": dash}},
        {"mark": {"type": "point", "filled": True, "size": 70},
         "encoding": base | {"shape": shape, "opacity": seen, "tooltip": tip}},
    ]  # fmt: skip
    if line is not None:
        layer.append(_reference(line, vertical=False))
    chart: Chart = {
        "description": f"Lines. {title}, over {axis}: {', '.join(names)}. {note}",
        "height": height,
        "data": {"values": rows},
        "layer": layer,
    }
    known = [dict(one.points) for one in shown]
    cells = tuple(
        (f"{at}", *(show(of_line[at]) if at in of_line else "-" for of_line in known))
        for at in steps
    )
    table = Table((axis, *names), cells, title, folded=True)
    return Picture(title, chart, (table,), note)


def gantt(title: str, axis: str, shown: Sequence[Row]) -> Picture:
    """Lanes of every row below each other, on one axis of time; waiting with its ms."""
    rows, order, heads = [], list[str](), []
    for number, row in enumerate(shown):
        head = f"{number}"
        heads.append({"row": head, "said": row.said})
        order += [head, *(f"{number} {lane}" for lane in row.lanes)]
        rows += [
            bit._asdict()
            | {"row": f"{number} {bit.lane}", "length": bit.end - bit.start, "of": row.said}
            for bit in row.bits
        ]
    end = max((bit.end for row in shown for bit in row.bits), default=1.0)
    kinds = {"work": color("blue"), "transfer": color("teal"), "waiting": color("red")}
    fill = {"field": "kind", "type": "nominal", "legend": {"symbolType": "square"},
            "scale": {"domain": list(kinds), "range": list(kinds.values())}}  # fmt: skip
    y = {
        "field": "row",
        "type": "nominal",
        "sort": order,
        "title": None,
        "scale": {"domain": order, "paddingInner": 0.12},
        "axis": {
            "labelExpr": "slice(datum.value, indexof(datum.value, ' ') + 1 || 99)",
            "ticks": False,
            "domain": False,
            "minExtent": _LABELS,
            "maxExtent": _LABELS,
        },
    }
    x = _quantity("start", axis) | {"scale": {"domain": [0, end], "nice": False}, "axis": _TICKS}
    tip = [{"field": "name", "title": "what"}, {"field": "lane"},
           *({"field": at, "format": ".3f", "title": f"{at}, ms"}
             for at in ("start", "end", "length"))]  # fmt: skip
    wide = f"width * datum.length / {end} > 20"
    chart: Chart = {
        "description": f"Lanes over time. {axis}. " + "; ".join(row.said for row in shown),
        "height": _LANE * len(order),
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "bar", "stroke": color("paper"), "strokeWidth": 0.5},
             "encoding": {"x": x, "x2": {"field": "end"}, "y": y, "color": fill, "tooltip": tip}},
            {"transform": [{"filter": "datum.kind == 'waiting'"},
                           {"calculate": "(datum.start + datum.end) / 2", "as": "middle"},
                           {"calculate": "format(datum.length, '.1f')", "as": "ms"}],
             "mark": {"type": "text", "color": color("paper"), "fontSize": 11, "clip": True,
                      "opacity": {"expr": f"{wide} ? 1 : 0"}},
             "encoding": {"x": {"field": "middle", "type": "quantitative"}, "y": y,
                          "text": {"field": "ms"}}},
            {"data": {"values": heads},
             "mark": {"type": "text", "align": "left", "dy": 3, "fontWeight": "bold"},
             "encoding": {"x": {"value": -_LABELS}, "y": y, "text": {"field": "said"}}},
        ],
    }  # fmt: skip
    return Picture(title, chart, tuple(map(_table_of, shown)))


def _table_of(row: Row) -> Table:
    cells = tuple(
        (bit.name, bit.lane, *(f"{ms:.3f}" for ms in (bit.start, bit.end, bit.end - bit.start)))
        for bit in sorted(row.bits, key=lambda bit: (bit.start, bit.lane))
    )
    return Table(("what", "lane", "from, ms", "to, ms", "takes, ms"), cells, row.said, folded=True)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _quantity(field: str, title: str) -> Chart:
    return {"field": field, "type": "quantitative", "title": title}


def _name_above() -> Chart:
    """What a bar is, above it."""
    mark = {"type": "text", "align": "left", "yOffset": -8, "x": 0}
    # On paper, where a line crosses it.
    paper = mark | {"stroke": color("paper"), "strokeWidth": 4, "strokeJoin": "round"}
    text = {"text": {"field": "said"}}
    return {"layer": [{"mark": paper, "encoding": text}, {"mark": mark, "encoding": text}]}


def _reference(line: tuple[str, float], *, vertical: bool) -> Chart:
    name, value = line
    along, across = ("x", "y") if vertical else ("y", "x")
    data: Mapping[str, object] = {"values": [{"at": value, "name": name}]}
    hue = color("orange" if name.lower().startswith("megatron") else "faint")
    rule = {"type": "rule", "strokeDash": [5, 4], "color": hue, "strokeWidth": 1.5}
    tip = {"field": "name", "title": "line"}
    text = {"type": "text", "color": hue, "align": "left" if vertical else "right"}
    place = {"dx": 4, "y": -6} if vertical else {"dy": -3, "x": "width", "baseline": "bottom"}
    at = {along: {"field": "at", "type": "quantitative"}}
    # The encoding that others share must not put it onto one of their rows.
    free = {across: None}
    return {
        "data": data,
        "layer": [
            {"mark": rule, "encoding": at | free | {"tooltip": tip}},
            {"mark": text | place, "encoding": at | free | {"text": {"field": "name"}}},
        ],
    }
