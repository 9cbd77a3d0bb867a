"""Draw the pictures of the README into docs/, simulated, at typical figures.

forms: one layer on one rank in three forms on one axis of time; Llama 3 8B, TP 8, 32,768 tokens,
the server with Ascend 910B: forward, then backward, of a layer among many; overlapped, the layer of
a forward beside that of a backward.  In Chinese, too.  results: how much less time than in
Megatron's order a layer of 8,192 tokens takes, forward and backward, in each form; whiskers over
the ranges of the machine's description.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.drawing import Chart, draw
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.simulate.simulate_command import layer_picture
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.variants import FUSED, MEGATRON, OVERLAP, Variant
from commfuse_npu.tools.simulate.variants import forms as simulated
from scripts.evidence import layers

_HARDWARE = "ascend_910b_server"
_MODEL = "llama3_8b"
_TP = 8
_TOKENS = 32768
_SHOWN_OF_RESULTS = 0, 1, 2, 4
"""Rows of :data:`layers.RESULTS`; all would be a long picture."""
_AXIS = [-10, 30]
"""Per cent; whiskers end there."""
_PLAIN = {"ticks": False, "domain": False, "labelLimit": 0}
_COLORS = ("#c0392b", "#e59866", "#7fb3d5", "#2e86c1", "#a6acaf")


def step() -> TrainingStep:
    """The simulated step of the picture ``forms``."""
    hardware = Hardware.find(_HARDWARE)
    return TrainingStep(hardware.machine(), layers.layer(_MODEL, _TP, _TOKENS))


def forms() -> list[Variant]:
    """The variants of the picture ``forms``."""
    example = step()
    variants = {form.name: form for form in simulated(example.machine, example.training)}
    return [variants[name] for name in (MEGATRON.name, f"{FUSED}, tuned", OVERLAP.name)]


def _results() -> Chart:
    rows = []
    for at in _SHOWN_OF_RESULTS:
        layout = layers.RESULTS[at]
        for form, saved in layers.saved(layout).items():
            low, typical, high = (100 * part for part in saved)
            rows.append({"layout": ", ".join(layout), "form": form, "saved": typical, "low": low,
                         "high": high, "end": max(high, 0.0)})  # fmt: skip
    across = {
        "type": "quantitative",
        "title": None,
        "axis": None,
        "scale": {"domain": _AXIS, "nice": False},
    }
    forms = {"field": "form", "sort": list(layers.RESULT_FORMS), "title": None}
    colors = {"domain": list(layers.RESULT_FORMS), "range": _COLORS}
    spec = {
        "width": 260,
        "height": {"step": 15},
        "encoding": {"y": forms | {"type": "nominal", "axis": _PLAIN}},
        "layer": [
            {
                "mark": {"type": "bar", "height": 11},
                "encoding": {
                    "x": {"field": "saved", **across},
                    "color": {"field": "form", "scale": colors, "legend": None},
                },
            },
            {
                "mark": {"type": "rule", "opacity": 0.6, "clip": True},
                "encoding": {"x": {"field": "low", **across}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "fontSize": 12},
                "encoding": {
                    "x": {"field": "end", **across},
                    "text": {"field": "saved", "format": ".1f"},
                },
            },
        ],
    }
    header = {
        "title": None,
        "labelOrient": "top",
        "labelAnchor": "start",
        "labelFontWeight": "bold",
    }
    return {
        "title": "% less time per layer than in Megatron's order",
        "data": {"values": rows},
        "facet": {"row": {"field": "layout", "sort": None, "header": header}},
        "spec": spec,
    }


_TITLES = {
    "forms": "Llama 3 8B, TP 8, 32,768 tokens,\nA2 server, simulated",
    "results": "A layer of 8,192 tokens, simulated",
}


_CHINESE = {
    "One layer, forward and backward": "一层 前向加反向",
    "ms, typical figures; lower is better": "毫秒 取典型值 越少越好",
    "32,768 tokens": "32,768 个 token",
    "A2 server, simulated": "A2 服务器 仿真",
    "Megatron's order": "Megatron 的顺序",
    "fused layers, tuned": "融合的层 调优",
    "overlap": "前反向重叠",
    "side stream": "副流",
    "compute": "计算流",
    "links": "链路",
    "waiting": "等待",
    "transfer": "传输",
    "work": "计算",
    " ms": " 毫秒",
}
"""Texts of the picture ``forms``; longer ones first where one holds another."""


def _in_chinese(picture: str) -> str:
    def translated(text: re.Match[str]) -> str:
        words = text[0].replace("&#39;", "'").replace("&apos;", "'")
        for english, chinese in _CHINESE.items():
            words = words.replace(english, chinese)
        return words

    return re.sub(r"(?<=>)[^<>]+(?=</text>|</tspan>)", translated, picture)


def main(argv: Sequence[str]) -> int:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="forms, results; both by default")
    docs = Path(__file__).resolve().parents[2] / "docs"
    parser.add_argument("--folder", type=Path, default=docs, help="docs by default")
    options = parser.parse_args(argv)
    for name in options.names or _TITLES:
        picture = layer_picture(step(), forms()) if name == "forms" else _results()
        for dark, ending in ((False, ""), (True, "-dark")):
            path = options.folder / f"{name}{ending}.svg"
            draw([picture], _TITLES[name], path, dark=dark)
            if name == "forms":
                chinese = _in_chinese(path.read_text("utf-8"))
                path.with_name(f"forms-zh{ending}.svg").write_text(chinese, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
