"""Pictures in Vega-Lite, as files: vl-convert-python draws them, without a browser or a network.

The package is optional, and imported only for drawing.
"""

from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.runtime.atomic_write import atomic_write

_VERSION = "6.1"
"""Version of Vega-Lite."""
_CONFIG: dict[str, Any] = {
    "aria": False,  # longer files; the pages that include them describe them
    "view": {"stroke": None},
    "title": {"anchor": "start", "frame": "bounds"},
    "legend": {"orient": "bottom", "title": None, "labelLimit": 0, "symbolOpacity": 1,
               "columns": 4},
}  # fmt: skip
_COLORS = {"work": "#0b62c4", "forward": "#3d85d9", "recomputation": "#9467bd",
           "backward": "#e69f22", "weight gradients": "#8bc34a", "transfer": "#0a7a83",
           "links": "#0a7a83", "waiting": "#cf222e"}  # fmt: skip
"""Colors of bits by their kind."""

_LIGHT = "#e6edf3"
_DARK = "#0d1117"

Chart = dict[str, Any]
"""A Vega-Lite specification: one view, with a ``title`` and a ``height``."""


class Bit(NamedTuple):
    """A bar on a lane of a Gantt chart, in ms; ``kind``: a key of the colors.

    A bar that is wide enough shows its label.
    """

    lane: str
    start: float
    end: float
    kind: str
    label: str = ""


class Row(NamedTuple):
    """One variant of a Gantt chart: its heading, its lanes, and the bars on them."""

    label: str
    lanes: tuple[str, ...]
    bits: tuple[Bit, ...]


class Size(NamedTuple):
    """Of a Gantt chart: height of a lane, and widths of the names and of the axis, in pixels."""

    lane: int
    names: int
    axis: int


def gantt(
    title: str,
    axis: str,
    rows: Sequence[Row],
    size: Size,
    legend: bool = True,
) -> Chart:
    """A Gantt chart: the lanes of all rows on one time axis."""
    # Several rows have lanes of the same name: a number makes them distinct.
    order = [f"{n} {lane}" for n, row in enumerate(rows) for lane in ("", *row.lanes)]
    values = [
        bit._asdict() | {"row": f"{n} {bit.lane}", "ms": bit.end - bit.start}
        for n, row in enumerate(rows)
        for bit in row.bits
    ]
    end = max((bit.end for row in rows for bit in row.bits), default=1.0)
    kinds = [kind for kind in _COLORS if any(value["kind"] == kind for value in values)]
    colors = {"domain": kinds, "range": [_COLORS[kind] for kind in kinds]}
    labels = {"labelExpr": "slice(datum.value, indexof(datum.value, ' ') + 1)", "labelLimit": 0,
              "ticks": False, "domain": False,
              "minExtent": size.names, "maxExtent": size.names}  # fmt: skip
    y = {"field": "row", "type": "nominal", "title": None, "scale": {"domain": order},
         "axis": labels}  # fmt: skip
    x = {"type": "quantitative", "title": axis, "axis": {"grid": False}}
    domain = {"domain": [0, end], "nice": False}
    wide = f"datum.label && datum.ms * width > 8 * length(datum.label) * {end}"
    return {
        "title": title,
        "description": f"Lanes over time. {axis}. " + "; ".join(row.label for row in rows),
        "height": size.lane * len(order),
        "width": size.axis,
        "data": {"values": values},
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "bar", "stroke": "white", "strokeWidth": 0.5, "clip": True},
             "encoding": {"x": x | {"field": "start", "scale": domain}, "x2": {"field": "end"},
                          "color": {"field": "kind", "type": "nominal", "scale": colors,
                                    "legend": {} if legend else None}}},
            {"transform": [{"filter": wide},
                           {"calculate": "(datum.start + datum.end) / 2", "as": "middle"}],
             "mark": {"type": "text", "color": "white", "clip": True},
             "encoding": {"x": x | {"field": "middle"}, "text": {"field": "label"}}},
            {"data": {"values": [{"row": f"{n} ", "said": r.label} for n, r in enumerate(rows)]},
             "mark": {"type": "text", "align": "left", "fontWeight": "bold", "clip": False},
             "encoding": {"x": {"value": -size.names}, "text": {"field": "said"}}},
        ],
    }  # fmt: skip


def lacking() -> str | None:
    """What must be installed before drawing, or ``None``; does not import the package."""
    if util.find_spec("vl_convert"):
        return None
    return "needs vl-convert-python; pip install 'vl-convert-python>=1.9'"


def draw(charts: Sequence[Chart], title: str, path: Path, *, dark: bool = False) -> None:
    """Write charts under another title as PNG or SVG, by the file's suffix.

    Args:
        dark: for pages with light text on a dark background.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    if why := lacking():
        raise ValueError(f"a picture {why}")
    library = import_module("vl_convert")
    # The empty subtitle keeps a chart's own title off its axes.
    views = [
        ({} if "spec" in chart else {"width": 760})
        | chart
        | {"title": {"text": chart["title"], "subtitle": []}}
        for chart in charts
    ]
    heading = {"text": title.split("\n"), "fontSize": 16, "offset": 14}
    whole = {"title": heading, "config": _themed(dark), "vconcat": views,
             "resolve": {"scale": {"color": "independent"}}}  # fmt: skip
    with atomic_write(path) as part:
        if path.suffix.lower() == ".svg":
            part.write_text(library.vegalite_to_svg(whole, vl_version=_VERSION), encoding="utf-8")
        else:
            part.write_bytes(library.vegalite_to_png(whole, vl_version=_VERSION, scale=2))


def _themed(dark: bool) -> Chart:
    """The configuration with the colors of texts, axes and background."""
    if not dark:
        return _CONFIG
    words = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), _LIGHT)
    return {
        **_CONFIG,
        "background": _DARK,
        "title": _CONFIG["title"] | {"color": _LIGHT},
        "legend": _CONFIG["legend"] | words,
        "axis": words,
        "header": {"labelColor": _LIGHT},
        "text": {"color": _LIGHT},
        "rule": {"color": _LIGHT},
    }
