"""The pictures, as specifications in Vega-Lite: one view each, with a table of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Bar", "Bit", "Chart", "Line", "Picture", "Row", "Table", "bars", "gantt", "lines"]

Chart = dict[str, Any]
"""A specification in Vega-Lite: one view, with a ``description`` and a ``height``."""

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
"""Of bits, by what they are."""

_NAMED = {"labelExpr": "slice(datum.value, indexof(datum.value, ' ') + 1)", "labelLimit": 0,
          "ticks": False, "domain": False}  # fmt: skip
"""An axis of names, each after a number, by which equal ones differ."""


class Table(NamedTuple):
    """Cells as they are printed; ``**bold**`` and `` `code` `` as in Markdown.

    Attributes:
        folded: whether it is shown only when it is asked for.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    folded: bool = False


class Picture(NamedTuple):
    """A chart, and the same numbers as tables; ``note``: what is not drawn, and why."""

    title: str
    chart: Chart
    tables: tuple[Table, ...]
    note: str = ""


class Bar(NamedTuple):
    """A figure, the least and the most that it may be, and the name of a colour."""

    name: str
    value: float
    low: float
    high: float
    said: str
    color: str = "grey"


class Line(NamedTuple):
    """A variant over something: pairs of a label or a number and a figure."""

    name: str
    points: tuple[tuple[str | float, float], ...]
    ours: bool = False


class Bit(NamedTuple):
    """Something on a lane of a Gantt, in ms; ``kind``: ``work``, ``transfer``, ``waiting``."""

    lane: str
    name: str
    start: float
    end: float
    kind: str


class Row(NamedTuple):
    """One variant of a Gantt chart: its heading, its lanes, and what is on them."""

    said: str
    lanes: tuple[str, ...]
    bits: tuple[Bit, ...]


def bars(
    title: str, axis: str, shown: Sequence[Bar], line: tuple[str, float], note: str = ""
) -> Picture:
    """A bar for each below its name, with its range as whiskers, and a line across to compare."""
    order = [f"{n} {one.said}" for n, one in enumerate(shown)]
    rows = [
        one._asdict() | {"row": row, "color": _COLORS[one.color]}
        for row, one in zip(order, shown, strict=True)
    ]
    above = _NAMED | {"labelAlign": "left", "labelPadding": 0, "labelOffset": -16}
    scale = {"domain": order}
    y = {"field": "row", "type": "nominal", "scale": scale, "title": None, "axis": above}
    bar: Chart = {
        "mark": {"type": "bar", "height": 14, "tooltip": True},
        "encoding": {"x": _x("value", axis), "color": {"field": "color", "scale": None}},
    }
    whiskers: Chart = {
        "transform": [{"filter": "datum.low < datum.high"}],
        "mark": {"type": "errorbar", "ticks": {"size": 9}},
        "encoding": {"x": _x("low", axis), "x2": {"field": "high"}},
    }
    # Vega gives marks without data a legend of their own.
    ranges = [whiskers] if any(one.low < one.high for one in shown) else []
    chart = {
        "description": f"Bars. {axis}. {'; '.join(one.said for one in shown)}",
        "height": 46 * len(order),
        "data": {"values": rows},
        "layer": [{"encoding": {"y": y}, "layer": [bar, *ranges]}, *_reference(line, "x")],
    }
    cells = tuple((one.name, *(f"{value:.4g}" for value in one[1:4])) for one in shown)
    head = "variant", "typical", "least", "most"
    return Picture(title, chart, (Table(head, cells, f"{title}: {axis}", folded=True),), note)


def lines(
    title: str,
    axis: str,
    shown: Sequence[Line],
    *,
    line: tuple[str, float] | None = None,
    whole: bool = False,
    note: str = "",
) -> Picture:
    """A line for each over what varies.

    Args:
        title: with what is drawn upwards.
        axis: what varies.
        line: a name and a figure to compare with, across the picture.
        whole: whether what varies is counted: ticks are whole numbers.
    """
    steps = list(dict.fromkeys(at for one in shown for at, _ in one.points))
    names = [one.name for one in shown]
    x: Chart = {"field": "at", "title": axis, "type": "ordinal", "sort": steps,
                "axis": {"labelAngle": 0}}  # fmt: skip
    if not any(isinstance(at, str) for at in steps):
        ticks: Chart = {"tickMinStep": 1, "format": "d"} if whole else {"format": ".4~g"}
        if len(steps) <= 8:
            ticks["values"] = steps
        x |= {"type": "quantitative", "scale": {"zero": False, "nice": False},
              "axis": {"grid": False, **ticks}}  # fmt: skip
    # Of equal domains Vega makes one legend. No two of 80 lines look alike: 10 hues, 8 marks, and
    # dashes for all that are not ours.
    kind = {"field": "name", "type": "nominal", "scale": {"domain": names}}
    dashes = {"domain": names, "range": [[1, 0] if one.ours else [6, 3] for one in shown]}
    # Among many the mouse finds the points.
    opacity = 1 if len(steps) <= 40 else 0
    rows = [{"name": one.name, "at": at, "value": v} for one in shown for at, v in one.points]
    chart: Chart = {
        "description": f"Lines. {title}, over {axis}: {', '.join(names)}. {note}",
        "height": 300,
        "data": {"values": rows},
        "layer": [
            {"encoding": {
                "x": x,
                "y": {"field": "value", "type": "quantitative", "title": None,
                      "scale": {"zero": False}},
                "color": kind | {"legend": {"symbolOpacity": 1}}},
             "layer": [
                {"mark": "line",
                 "encoding": {"strokeDash": kind | {"scale": dashes, "legend": None}}},
                {"mark": {"type": "point", "filled": True, "size": 70, "opacity": opacity,
                          "tooltip": True},
                 "encoding": {"shape": kind}}]},
            *_reference(line, "y"),
        ],
    }  # fmt: skip
    known = [{at: f"{value:.4g}" for at, value in one.points} for one in shown]
    cells = tuple((f"{at}", *(of.get(at, "-") for of in known)) for at in steps)
    return Picture(title, chart, (Table((axis, *names), cells, title, folded=True),), note)


def gantt(title: str, axis: str, shown: Sequence[Row]) -> Picture:
    """Lanes of every row below each other, on one axis of time; waiting with its ms."""
    # Lanes of several rows have the same names: a number makes them different.
    order = [f"{n} {lane}" for n, row in enumerate(shown) for lane in ("", *row.lanes)]
    rows = [
        bit._asdict() | {"row": f"{n} {bit.lane}", "of": row.said, "ms": bit.end - bit.start}
        for n, row in enumerate(shown)
        for bit in row.bits
    ]
    end = max((bit.end for row in shown for bit in row.bits), default=1.0)
    kinds = [kind for kind in _KINDS if any(bit.kind == kind for r in shown for bit in r.bits)]
    colors = {"domain": kinds, "range": [_COLORS[_KINDS[kind]] for kind in kinds]}
    y = {"field": "row", "type": "nominal", "title": None, "scale": {"domain": order},
         "axis": _NAMED | {"minExtent": 66, "maxExtent": 66}}  # fmt: skip
    x = _x("start", axis) | {"scale": {"domain": [0, end], "nice": False}}
    wide = f"datum.kind == 'waiting' && datum.ms > {end / 40}"
    chart: Chart = {
        "description": f"Lanes over time. {axis}. " + "; ".join(row.said for row in shown),
        "height": 24 * len(order),
        "data": {"values": rows},
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5, "tooltip": True},
             "encoding": {"x": x, "x2": {"field": "end"},
                          "color": {"field": "kind", "type": "nominal", "scale": colors}}},
            {"transform": [{"filter": wide},
                           {"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
             "mark": {"type": "text", "color": "white"},
             "encoding": {"x": _x("middle", axis), "text": {"field": "ms", "format": ".1f"}}},
            {"data": {"values": [{"row": f"{n} ", "said": r.said} for n, r in enumerate(shown)]},
             "mark": {"type": "text", "align": "left", "fontWeight": "bold"},
             "encoding": {"x": {"value": -66}, "text": {"field": "said"}}},
        ],
    }  # fmt: skip
    tables = []
    for row in shown:
        cells = tuple(
            (bit.name, bit.lane, *(f"{ms:.3f}" for ms in (bit.start, bit.end, bit.end - bit.start)))
            for bit in sorted(row.bits, key=lambda bit: (bit.start, bit.lane))
        )
        head = "what", "lane", "from, ms", "to, ms", "takes, ms"
        tables.append(Table(head, cells, row.said, folded=True))
    return Picture(title, chart, tuple(tables))


def _x(field: str, title: str) -> Chart:
    return {"field": field, "type": "quantitative", "title": title, "axis": {"grid": False}}


def _reference(line: tuple[str, float] | None, along: str) -> list[Chart]:
    """A dashed line at a figure, with its name; none without a figure."""
    if line is None:
        return []
    name, value = line
    at = {along: {"datum": value, "type": "quantitative"}}
    end: Chart = {"x": "width", "align": "right", "dy": -6} if along == "y" else {
        "y": -6, "align": "left", "dx": 4}  # fmt: skip
    hue = _COLORS["orange" if name.lower().startswith("megatron") else "faint"]
    return [
        {"data": {"values": [{}]}, "mark": mark, "encoding": at}
        for mark in (
            {"type": "rule", "strokeDash": [5, 4], "color": hue},
            {"type": "text", "text": name, "color": hue} | end,
        )
    ]
