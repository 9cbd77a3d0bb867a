"""Converts Vega-Lite to files with vl-convert-python: no browser, no network.

The package is optional, and imported only for drawing.
"""

from __future__ import annotations

from importlib import import_module, util
from pathlib import Path

from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.report.charts import Picture

__all__ = ["draw", "lacking"]

_VERSION = "6.1"
"""Version of Vega-Lite."""
_CONFIG = {
    "aria": False,  # longer files; the pages that include them describe them
    "view": {"stroke": None},
    "title": {"anchor": "start", "frame": "bounds"},
    "legend": {
        "orient": "bottom",
        "title": None,
        "labelLimit": 0,
        "symbolOpacity": 1,
        "columns": 4,
    },
}


def lacking() -> str | None:
    """What must be installed before drawing, or ``None``; does not import the package."""
    if util.find_spec("vl_convert"):
        return None
    return "needs vl-convert-python; pip install 'vl-convert-python>=1.9'"


def draw(picture: Picture, title: str, path: Path) -> None:
    """Write a picture under a title as PNG or SVG, by the file's suffix.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    if why := lacking():
        raise ValueError(f"a picture {why}")
    library = import_module("vl_convert")
    # The empty subtitle keeps the chart's own title off its axes.
    chart = picture.chart | {"title": {"text": picture.title, "subtitle": []}, "width": 760}
    whole = {"title": {"text": title, "fontSize": 16, "offset": 14}, "config": _CONFIG,
             "vconcat": [chart], "resolve": {"scale": {"color": "independent"}}}  # fmt: skip
    with atomic_write(path) as part:
        if path.suffix.lower() == ".svg":
            part.write_text(library.vegalite_to_svg(whole, vl_version=_VERSION), encoding="utf-8")
        else:
            part.write_bytes(library.vegalite_to_png(whole, vl_version=_VERSION, scale=1.5))
