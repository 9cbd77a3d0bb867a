"""Vega-Lite to files and to HTML, by vl-convert-python: no browser, no network.

It is optional, and imported when something is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol

from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.report.palette import color, on_paper

__all__ = ["KINDS", "PAGES", "Chart", "draw", "draw_charts", "lacking", "script"]

Chart = dict[str, Any]
"""A specification in Vega-Lite: one view, with a ``description`` and a ``height``."""

KINDS, PAGES = (".png", ".svg"), (".html", ".htm")
_VERSION = "6.1"
"""Of Vega-Lite."""
_WIDTH = 760
_LINE = 110
"""Characters of a note in that width."""
_SCALE = 1.5
_LACKING = "needs vl-convert-python; pip install 'vl-convert-python>=1.9'"


def lacking() -> str | None:
    """What has to be done before anything can be drawn; looks, and does not import."""
    return None if util.find_spec("vl_convert") else _LACKING


def _library() -> Any:
    """The library.

    Raises:
        ValueError: it is not installed; the message has the command.
    """
    if why := lacking():
        raise ValueError(f"a picture {why}")
    return import_module("vl_convert")


class Titled(Protocol):
    """A chart with its title, and a note of what is not drawn."""

    @property
    def title(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def chart(self) -> Chart: ...


def draw(pictures: Sequence[Titled], title: str, path: Path) -> None:
    """Write the pictures, one below the other, as PNG or SVG by the name's ending.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    charts = [one.chart | {"title": _title(one), "width": _WIDTH} for one in pictures]
    draw_charts(charts, title, path)


def draw_charts(charts: Sequence[Chart], title: str, path: Path, columns: int = 1) -> None:
    """Write charts that have a width, in so many columns.

    Raises:
        OSError, ValueError: see :func:`draw`.
    """
    heading = {"text": title, "fontSize": 16, "anchor": "start", "offset": 14}
    resolve = {"scale": dict.fromkeys(("color", "shape", "strokeDash", "x", "y"), "independent")}
    whole = {"title": heading, "concat": list(charts), "columns": columns, "spacing": 34,
             "resolve": resolve}  # fmt: skip
    text = on_paper(json.dumps(_config() | whole))
    vl = _library()
    with whole_file(path) as part:
        if path.suffix.lower() == ".svg":
            part.write_text(vl.vegalite_to_svg(text, vl_version=_VERSION), encoding="utf-8")
        else:
            part.write_bytes(vl.vegalite_to_png(text, vl_version=_VERSION, scale=_SCALE))


def script(charts: Sequence[Chart]) -> str:
    """JavaScript that draws each chart into the element ``chart-0``, ``chart-1``, ..., in its
    width; Vega and all that it needs are in it."""
    vl = _library()
    # In the width that there is.
    drawn = [
        _config() | chart
        | {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
        for chart in charts
    ]  # fmt: skip
    options = (
        '{actions: false, renderer: "svg", defaultStyle: false, '
        "tooltip: {disableDefaultStyle: true}}"
    )
    # Nothing in a text may end the script.
    specs = json.dumps(drawn).replace("</", "<\\/")
    loop = f"{specs}.forEach((chart, at) => vegaEmbed(`#chart-${{at}}`, chart, {options}));"
    return str(vl.javascript_bundle(loop, _VERSION))


def _title(picture: Titled) -> Chart:
    lines = wrap(picture.note, _LINE)
    return {"text": picture.title, "subtitle": lines, "subtitleColor": color("faint")}


def _config() -> Chart:
    font = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"
    text = {"labelColor": color("ink"), "titleColor": color("ink")}
    return {
        "$schema": f"https://vega.github.io/schema/vega-lite/v{_VERSION.split('.')[0]}.json",
        "background": color("paper"),
        "config": {
            # What a picture shows is said around it, and in its tables.
            "aria": False,
            "font": font,
            "view": {"stroke": None},
            "title": {"color": color("ink"), "anchor": "start", "fontSize": 13,
                      "frame": "bounds"},
            "axis": text | {"gridColor": color("grid"), "domainColor": color("faint"),
                            "tickColor": color("faint"), "labelFontSize": 12, "titleFontSize": 12,
                            "titleFontWeight": "normal"},
            "legend": text | {"labelFontSize": 12, "labelLimit": 0, "orient": "bottom",
                              "title": None, "symbolSize": 90, "symbolStrokeWidth": 2},
            "text": {"color": color("ink"), "font": font, "fontSize": 12},
        },
    }  # fmt: skip
