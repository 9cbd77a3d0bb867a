"""The charts, as Vega-Lite specifications: one view each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Bit", "Chart", "Picture", "Row", "gantt"]

Chart = dict[str, Any]
"""A Vega-Lite specification: one view, with a ``height``."""

_COLORS = {"work": "#0b62c4", "transfer": "#0a7a83", "waiting": "#cf222e"}
"""Colors of bits by their kind."""


class Picture(NamedTuple):
    """A chart and its title."""

    title: str
    chart: Chart


class Bit(NamedTuple):
    """A bar on a lane of a Gantt chart, in ms; ``kind``: ``work``, ``transfer``, ``waiting``."""

    lane: str
    start: float
    end: float
    kind: str


class Row(NamedTuple):
    """One variant of a Gantt chart: its heading, its lanes, and the bars on them."""

    label: str
    lanes: tuple[str, ...]
    bits: tuple[Bit, ...]


def gantt(title: str, axis: str, rows: Sequence[Row]) -> Picture:
    """A Gantt chart: the lanes of all rows on one time axis; waiting is labeled with its ms."""
    # Several rows have lanes of the same name: a number makes them distinct.
    order = [f"{n} {lane}" for n, row in enumerate(rows) for lane in ("", *row.lanes)]
    values = [
        bit._asdict() | {"row": f"{n} {bit.lane}", "ms": bit.end - bit.start}
        for n, row in enumerate(rows)
        for bit in row.bits
    ]
    end = max((bit.end for row in rows for bit in row.bits), default=1.0)
    kinds = [kind for kind in _COLORS if any(bit.kind == kind for r in rows for bit in r.bits)]
    colors = {"domain": kinds, "range": [_COLORS[kind] for kind in kinds]}
    names = {"labelExpr": "slice(datum.value, indexof(datum.value, ' ') + 1)", "labelLimit": 0,
             "ticks": False, "domain": False, "minExtent": 66, "maxExtent": 66}  # fmt: skip
    y = {"field": "row", "type": "nominal", "title": None, "scale": {"domain": order},
         "axis": names}  # fmt: skip
    x = {"type": "quantitative", "title": axis, "axis": {"grid": False}}
    domain = {"domain": [0, end], "nice": False}
    wide = f"datum.kind == 'waiting' && datum.ms * width > {24 * end}"
    chart: Chart = {
        "description": f"Lanes over time. {axis}. " + "; ".join(row.label for row in rows),
        "height": 24 * len(order),
        "data": {"values": values},
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5, "clip": True},
             "encoding": {"x": x | {"field": "start", "scale": domain}, "x2": {"field": "end"},
                          "color": {"field": "kind", "type": "nominal", "scale": colors}}},
            {"transform": [{"filter": wide},
                           {"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
             "mark": {"type": "text", "color": "white", "clip": True},
             "encoding": {"x": x | {"field": "middle"}, "text": {"field": "ms", "format": ".1f"}}},
            {"data": {"values": [{"row": f"{n} ", "said": r.label} for n, r in enumerate(rows)]},
             "mark": {"type": "text", "align": "left", "fontWeight": "bold", "clip": False},
             "encoding": {"x": {"value": -66}, "text": {"field": "said"}}},
        ],
    }  # fmt: skip
    return Picture(title, chart)
