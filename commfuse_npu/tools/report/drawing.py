"""Converts Vega-Lite to files and to JavaScript with vl-convert-python: no browser, no network.

The package is optional, and imported only for drawing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module, util
from pathlib import Path
from textwrap import wrap
from typing import Any

from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.report.charts import Chart, Picture

__all__ = ["PAGES", "draw", "lacking", "script"]

PAGES = ".html", ".htm"
_VERSION = "6.1"
"""Version of Vega-Lite."""
_CONFIG = {
    "aria": False,  # the page describes each picture
    "view": {"stroke": None},
    "title": {"anchor": "start", "frame": "bounds"},
    "legend": {
        "orient": "bottom",
        "title": None,
        "labelLimit": 0,
        "symbolOpacity": 1,
        "columns": {"expr": "width < 480 ? 2 : 4"},
    },
}


def lacking() -> str | None:
    """What must be installed before drawing, or ``None``; does not import the package."""
    if util.find_spec("vl_convert"):
        return None
    return "needs vl-convert-python; pip install 'vl-convert-python>=1.9'"


def _library() -> Any:
    if why := lacking():
        raise ValueError(f"a picture {why}")
    return import_module("vl_convert")


def draw(pictures: Sequence[Picture], title: str, path: Path, width: int = 760) -> None:
    """Write the pictures, one below the other, as PNG or SVG, by the file's suffix.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    charts = [
        picture.chart
        | {"title": {"text": picture.title, "subtitle": wrap(picture.note, 110)}, "width": width}
        for picture in pictures
    ]
    resolve = {"scale": dict.fromkeys(("color", "shape", "strokeDash", "x", "y"), "independent")}
    whole = {"title": {"text": title, "fontSize": 16, "offset": 14}, "config": _CONFIG,
             "vconcat": charts, "spacing": 34, "resolve": resolve}  # fmt: skip
    library = _library()
    with atomic_write(path) as part:
        if path.suffix.lower() == ".svg":
            part.write_text(library.vegalite_to_svg(whole, vl_version=_VERSION), encoding="utf-8")
        else:
            part.write_bytes(library.vegalite_to_png(whole, vl_version=_VERSION, scale=1.5))


def script(charts: Sequence[Chart]) -> str:
    """JavaScript, including Vega, that draws chart i into ``chart-i`` at the element's width."""
    fit = {"config": _CONFIG, "background": None, "width": "container",
           "autosize": {"type": "fit-x"}}  # fmt: skip
    # No text may contain the end of the script element.
    specs = json.dumps([chart | fit for chart in charts]).replace("</", "<\\/")
    options = "{actions: {export: true, source: false, compiled: false, editor: false}, " + (
        'renderer: "svg"}'
    )
    loop = f"{specs}.forEach((chart, i) => vegaEmbed(`#chart-${{i}}`, chart, {options}));"
    return str(_library().javascript_bundle(loop, _VERSION))
