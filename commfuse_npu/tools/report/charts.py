"""The charts, as Vega-Lite specifications: one view each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Bar", "Bit", "Chart", "Line", "Picture", "Row", "Table", "bars", "gantt", "heat",
           "lines", "stacks"]  # fmt: skip

Chart = dict[str, Any]
"""A Vega-Lite specification: one view, with a ``description`` and a ``height``."""

_COLORS = {
    "faint": "#59636e",
    "blue": "#0b62c4",
    "orange": "#c25400",
    "grey": "#6e7781",
    "green": "#1a7f37",
    "purple": "#8250df",
    "teal": "#0a7a83",
    "red": "#cf222e",
}
_KINDS = {"work": "blue", "transfer": "teal", "waiting": "red"}
"""Colors of bits by their kind."""

_SAID = "slice(datum.value, indexof(datum.value, ' ') + 1)"
_NAMED = {"labelExpr": _SAID, "labelLimit": 0, "ticks": False, "domain": False}
"""An axis of names, each preceded by a number that makes equal names distinct."""
_NARROW = "width < 480"
_ABOVE = {"labelExpr": f"{_NARROW} ? split({_SAID}, '; ') : replace({_SAID}, '; ', ', ')",
          "labelAlign": "left", "labelPadding": 0,
          "labelOffset": {"expr": f"{_NARROW} ? -28 : -16"}}  # fmt: skip
"""Axis with names above their bars; if narrow, text after "; " goes on a second line."""


class Table(NamedTuple):
    """Table cells as text; ``**bold**`` and `` `code` `` as in Markdown."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str


class Picture(NamedTuple):
    """A chart, and its main result in a sentence; ``note``: what is not drawn, and why."""

    title: str
    chart: Chart
    note: str = ""
    answer: str = ""


class Bar(NamedTuple):
    """A value with its lowest and highest possible value, and the name of a color."""

    name: str
    value: float
    low: float
    high: float
    label: str
    color: str = "grey"


class Line(NamedTuple):
    """A variant over an axis: pairs of (label or number, value)."""

    name: str
    points: tuple[tuple[str | float, float], ...]
    ours: bool = False


class Bit(NamedTuple):
    """A bar on a lane of a Gantt chart, in ms; ``kind``: ``work``, ``transfer``, ``waiting``."""

    lane: str
    name: str
    start: float
    end: float
    kind: str


class Row(NamedTuple):
    """One variant of a Gantt chart: its heading, its lanes, and the bars on them."""

    label: str
    lanes: tuple[str, ...]
    bits: tuple[Bit, ...]


def bars(
    title: str, axis: str, entries: Sequence[Bar], line: tuple[str, float], note: str = ""
) -> Picture:
    """A bar below each name, with its range as whiskers, and a reference line."""
    order = [f"{n} {bar.label}" for n, bar in enumerate(entries)]
    rows = [
        bar._asdict() | {"row": row, "color": _COLORS[bar.color]}
        for row, bar in zip(order, entries, strict=True)
    ]
    y = _names(order, _ABOVE)
    bar: Chart = {
        "mark": {"type": "bar", "height": 14, "tooltip": True},
        "encoding": {"x": _x("value", axis), "color": {"field": "color", "scale": None}},
    }
    whiskers: Chart = {
        "transform": [{"filter": "datum.low < datum.high"}],
        "mark": {"type": "errorbar", "ticks": {"size": 9}},
        "encoding": {"x": _x("low", axis), "x2": {"field": "high"}},
    }
    # Vega adds a separate legend for marks without data.
    ranges = [whiskers] if any(bar.low < bar.high for bar in entries) else []
    chart = {
        "description": f"Bars. {axis}. {'; '.join(bar.label for bar in entries)}",
        "height": 52 * len(order),
        "data": {"values": rows},
        "layer": [{"encoding": {"y": y}, "layer": [bar, *ranges]}, *_reference(line, "x")],
    }
    return Picture(title, chart, note)


def stacks(
    title: str, axis: str, entries: Sequence[tuple[str, dict[str, float]]], line: tuple[str, float]
) -> Picture:
    """A stacked bar of parts below each name, and a reference line."""
    order = [f"{n} {name}" for n, (name, _) in enumerate(entries)]
    pairs = list(zip(order, (values for _, values in entries), strict=True))
    parts = list(entries[0][1])
    hues = [_COLORS[name] for name in ("blue", "teal", "orange", "purple", "grey")]
    color = {"field": "part", "scale": {"domain": parts, "range": hues}}
    bar: Chart = {
        "mark": {"type": "bar", "height": 14, "tooltip": True},
        "encoding": {"x": _x("value", axis), "y": _names(order, _ABOVE), "color": color,
                     "order": {"field": "at"}},
    }  # fmt: skip
    chart = {
        "description": f"Bars of parts. {axis}. {'; '.join(name for name, _ in entries)}",
        "height": 52 * len(order),
        "data": {"values": [
            {"row": row, "part": part, "value": value, "at": parts.index(part)}
            for row, values in pairs for part, value in values.items()]},
        "layer": [bar, *_reference(line, "x")],
    }  # fmt: skip
    return Picture(title, chart)


def heat(title: str, x: str, cells: Sequence[tuple[str, str, float]]) -> Picture:
    """A heat map: cells of (column, row, value); darker is more."""
    largest = max([1e-9, *(value for _, _, value in cells)])
    axis = {"labelAngle": 0, "labelLimit": 0, "ticks": False, "domain": False}
    at: Chart = {"type": "ordinal", "sort": None, "axis": axis}
    hue = {"domain": [0, largest], "range": ["#e8f1fb", _COLORS["blue"]], "clamp": True}
    ink = {"condition": {"test": f"datum.value > {largest / 2}", "value": "#fff"}, "value": "#111"}
    chart: Chart = {
        "description": f"Heat map. {title}, by {x}",
        "height": 36 * len({down for _, down, _ in cells}),
        "data": {"values": [{"x": name, "y": down, "value": value} for name, down, value in cells]},
        "encoding": {"x": at | {"field": "x", "title": x}, "y": at | {"field": "y", "title": None}},
        "layer": [
            {"mark": "rect", "encoding": {
                "color": {"field": "value", "type": "quantitative", "scale": hue, "legend": None}}},
            {"mark": "text", "encoding": {
                "text": {"field": "value", "type": "quantitative", "format": ".1f"}, "color": ink}},
        ],
    }  # fmt: skip
    return Picture(title, chart)


def lines(
    title: str,
    axis: str,
    curves: Sequence[Line],
    *,
    line: tuple[str, float] | None = None,
    whole: bool = False,
    note: str = "",
) -> Picture:
    """A line per variant.

    Args:
        title: including the name of the y axis.
        axis: the name of the x axis.
        line: name and value of a reference line.
        whole: use only whole numbers as ticks of the x axis.
    """
    steps = list(dict.fromkeys(at for curve in curves for at, _ in curve.points))
    names = [curve.name for curve in curves]
    x: Chart = {"field": "at", "title": axis, "type": "ordinal", "sort": steps,
                "axis": {"labelAngle": 0}}  # fmt: skip
    if not any(isinstance(at, str) for at in steps):
        ticks: Chart = {"tickMinStep": 1, "format": "d"} if whole else {"format": ".4~g"}
        if len(steps) <= 8:
            ticks["values"] = steps
        x |= {"type": "quantitative", "scale": {"zero": False, "nice": False},
              "axis": {"grid": False, **ticks}}  # fmt: skip
    # Vega merges legends of equal domains. No two of 80 lines look alike: 10 hues, 8 marks, and
    # dashes for lines that are not ours.
    kind = {"field": "name", "type": "nominal", "scale": {"domain": names}}
    dashes = {"domain": names, "range": [[1, 0] if curve.ours else [6, 3] for curve in curves]}
    # With many points, they are invisible and only respond to the mouse.
    opacity = 1 if len(steps) <= 40 else 0
    rows = [
        {"name": curve.name, "at": at, "value": v} for curve in curves for at, v in curve.points
    ]
    chart: Chart = {
        "description": f"Lines. {title}, over {axis}: {', '.join(names)}. {note}",
        "height": 300,
        "data": {"values": rows},
        "layer": [
            {"encoding": {
                "x": x,
                "y": {"field": "value", "type": "quantitative", "title": None,
                      "scale": {"zero": False}},
                "color": kind},
             "layer": [
                {"mark": "line", "encoding": {"strokeDash": kind | {"scale": dashes}}},
                {"mark": {"type": "point", "filled": True, "size": 70, "opacity": opacity,
                          "tooltip": True},
                 "encoding": {"shape": kind}}]},
            *_reference(line, "y"),
        ],
    }  # fmt: skip
    return Picture(title, chart, note)


def gantt(title: str, axis: str, rows: Sequence[Row]) -> Picture:
    """A Gantt chart: the lanes of all rows on one time axis; waiting is labeled with its ms."""
    # Several rows have lanes of the same name: a number makes them distinct.
    order = [f"{n} {lane}" for n, row in enumerate(rows) for lane in ("", *row.lanes)]
    values = [
        bit._asdict() | {"row": f"{n} {bit.lane}", "of": row.label, "ms": bit.end - bit.start}
        for n, row in enumerate(rows)
        for bit in row.bits
    ]
    end = max((bit.end for row in rows for bit in row.bits), default=1.0)
    kinds = [kind for kind in _KINDS if any(bit.kind == kind for r in rows for bit in r.bits)]
    colors = {"domain": kinds, "range": [_COLORS[_KINDS[kind]] for kind in kinds]}
    y = _names(order, {"minExtent": 66, "maxExtent": 66})
    x = _x("start", axis) | {"scale": {"domain": [0, end], "nice": False}}
    wide = f"datum.kind == 'waiting' && datum.ms * width > {24 * end}"
    chart: Chart = {
        "description": f"Lanes over time. {axis}. " + "; ".join(row.label for row in rows),
        "height": 24 * len(order),
        "data": {"values": values},
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5, "tooltip": True,
                      "clip": True},
             "params": [{"name": "zoom", "bind": "scales", "select": {
                 "type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey]"}}],
             "encoding": {"x": x, "x2": {"field": "end"},
                          "color": {"field": "kind", "type": "nominal", "scale": colors}}},
            {"transform": [{"filter": wide},
                           {"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
             "mark": {"type": "text", "color": "white", "clip": True},
             "encoding": {"x": _x("middle", axis), "text": {"field": "ms", "format": ".1f"}}},
            {"data": {"values": [{"row": f"{n} ", "said": r.label} for n, r in enumerate(rows)]},
             "mark": {"type": "text", "align": "left", "fontWeight": "bold", "clip": False},
             "encoding": {"x": {"value": -66}, "text": {"field": "said"}}},
        ],
    }  # fmt: skip
    return Picture(title, chart)


def _names(order: Sequence[str], axis: Chart) -> Chart:
    return {"field": "row", "type": "nominal", "title": None, "scale": {"domain": order},
            "axis": _NAMED | axis}  # fmt: skip


def _x(field: str, title: str) -> Chart:
    return {"field": field, "type": "quantitative", "title": title, "axis": {"grid": False}}


def _reference(line: tuple[str, float] | None, along: str) -> list[Chart]:
    """A dashed, labeled line at a value; an empty list without one."""
    if line is None:
        return []
    name, value = line
    place = {along: {"datum": value, "type": "quantitative"}}
    end: Chart = {"x": "width", "align": "right", "dy": -6}
    if along == "x":
        right = f"scale('x', {value}) > width / 2"
        end = {"y": -6, "align": {"expr": f"{right} ? 'right' : 'left'"},
               "dx": {"expr": f"{right} ? -4 : 4"}}  # fmt: skip
    hue = _COLORS["orange" if name.lower().startswith("megatron") else "faint"]
    return [
        {"data": {"values": [{}]}, "mark": mark, "encoding": place}
        for mark in (
            {"type": "rule", "strokeDash": [5, 4], "color": hue},
            {"type": "text", "text": name, "color": hue} | end,
        )
    ]
