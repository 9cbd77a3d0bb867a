"""Draw docs/results.svg: how much less time a layer takes in each form, simulated.

Six layouts of 8,192 tokens, forward and backward, against blocking collectives: bars at typical
figures, whiskers over the ranges of the machine's description.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.tools.report.drawing import draw_charts
from scripts.evidence.layers import Point, point

__all__ = ["main"]

_MACHINES = {"ascend_910b_server": "A2 server", "ascend_910c_supernode": "A3 supernode"}
_MODELS = {"llama2_7b": "Llama 2 7B", "llama3_8b": "Llama 3 8B"}
_LAYOUTS = (
    ("ascend_910b_server", "llama2_7b", 2),
    *(("ascend_910b_server", "llama3_8b", tp) for tp in (2, 4, 8)),
    *(("ascend_910c_supernode", "llama3_8b", tp) for tp in (4, 8)),
)
_FORMS = {
    "forward-backward": "--commfuse-fb-overlap",
    "default": "--use-commfuse",
    "CoC": "CoC, slices",
    "CoC fused": "CoC, kernel",
    "MC2": "MC2",
}
_COLOURS = ("#c0392b", "#e59866", "#7fb3d5", "#2e86c1", "#a6acaf")


def _rows(one: Point) -> list[dict[str, Any]]:
    layout = f"{_MODELS[one.model]}, TP {one.tp}, {_MACHINES[one.machine]}"
    found = []
    for form, title in _FORMS.items():
        saved = [100 * (1 - shares[form]) for shares in one.shares if form in shares]
        if saved:
            low, high = min(saved), max(saved)
            row = {"layout": layout, "form": title, "saved": saved[0], "low": low, "high": high}
            found.append(row)
    return found


def _chart(points: Sequence[Point]) -> dict[str, Any]:
    forms = list(_FORMS.values())
    across = {"type": "quantitative", "title": "% less time than with blocking collectives"}
    colour = {"field": "form", "sort": forms, "scale": {"domain": forms, "range": _COLOURS}}
    return {
        "data": {"values": [row for one in points for row in _rows(one)]},
        "width": 620,
        "height": {"step": 12},
        "encoding": {
            "y": {"field": "layout", "sort": None, "title": None, "axis": {"labelLimit": 0}},
            "yOffset": {"field": "form", "sort": forms},
        },
        "layer": [
            {"mark": "bar", "encoding": {"x": {"field": "saved", **across}, "color": colour}},
            {
                "mark": {"type": "rule", "opacity": 0.6},
                "encoding": {"x": {"field": "low", **across}, "x2": {"field": "high"}},
            },
        ],
    }


def main(argv: Sequence[str]) -> int:
    """Simulate and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "results.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out = parser.parse_args(argv).out
    points = [point(*layout, 8192) for layout in _LAYOUTS]
    draw_charts([_chart(points)], "A layer of 8,192 tokens, simulated", out)
    return 0
