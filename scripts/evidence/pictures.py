"""Draw the pictures of the README into docs/, simulated, at typical figures.

forms: one layer on one rank in four forms on one axis of time; Llama 3 8B, TP 8, 32,768 tokens, the
server with Ascend 910B: forward, then backward, of a layer among many; overlapped, the layer of a
forward beside that of a backward.  results: how much less time than with blocking collectives a
layer of 8,192 tokens takes, forward and backward, in each form; whiskers over the ranges of the
machine's description.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.drawing import Chart, draw
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.simulate.lanes import layer_picture
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant
from commfuse_npu.tools.simulate.variants import forms as simulated
from scripts.evidence import layers

_HARDWARE = "ascend_910b_server"
_MODEL = "llama3_8b"
_TP = 8
_TOKENS = 32768
_MACHINES = {"ascend_910b_server": "A2 server", "ascend_910c_supernode": "A3 supernode"}
_MODELS = {"llama2_7b": "Llama 2 7B", "llama3_8b": "Llama 3 8B"}
_LAYOUTS = (
    ("ascend_910b_server", "llama2_7b", 2),
    *(("ascend_910b_server", "llama3_8b", tp) for tp in (2, 4, 8)),
    *(("ascend_910c_supernode", "llama3_8b", tp) for tp in (4, 8)),
)
_FORMS = {
    "commfuse-fb": "--commfuse-overlap",
    "commfuse": "--use-commfuse",
    "coc": "CoC, slices",
    "coc-fused": "CoC, kernel",
    "mc2": "MC2",
}
_COLORS = ("#c0392b", "#e59866", "#7fb3d5", "#2e86c1", "#a6acaf")


def step() -> TrainingStep:
    """The simulated step of the picture ``forms``."""
    hardware = Hardware.load(find_config(_HARDWARE, "hardware"))
    return TrainingStep(hardware.machine(), layers.layer(_MODEL, _TP, _TOKENS))


def forms() -> dict[str, Variant]:
    """The variants of the picture ``forms``, by title."""
    example = step()
    variants = {form.name: form for form in simulated(example.machine, example.training)}
    return {
        "plain collectives": REFERENCE,
        "Megatron's order": variants["megatron"],
        "fused layers (tuned)": variants["commfuse-tuned"],
        "forward-backward overlap, side by side": variants["commfuse-fb"],
    }


def _results() -> Chart:
    rows = []
    for machine, model, tp in _LAYOUTS:
        layout = f"{_MODELS[model]}, TP {tp}, {_MACHINES[machine]}"
        hardware = Hardware.load(find_config(machine, "hardware"))
        corners = layers.shares(hardware, layers.layer(model, tp, 8192), tuned=False)
        for form, title in _FORMS.items():
            saved = [100 * (1 - shares[form]) for shares in corners if form in shares]
            if saved:
                low = min(saved)
                high = max(saved)
                row = {"layout": layout, "form": title, "saved": saved[0], "low": low, "high": high}
                rows.append(row)
    forms = list(_FORMS.values())
    across = {"type": "quantitative", "title": "%"}
    color = {"field": "form", "sort": forms, "scale": {"domain": forms, "range": _COLORS}}
    return {
        "title": "% less time per layer than with blocking collectives",
        "data": {"values": rows},
        "height": {"step": 12},
        "encoding": {
            "y": {"field": "layout", "sort": None, "title": None, "axis": {"labelLimit": 0}},
            "yOffset": {"field": "form", "sort": forms},
        },
        "layer": [
            {"mark": "bar", "encoding": {"x": {"field": "saved", **across}, "color": color}},
            {
                "mark": {"type": "rule", "opacity": 0.6},
                "encoding": {"x": {"field": "low", **across}, "x2": {"field": "high"}},
            },
        ],
    }


_TITLES = {
    "forms": "Llama 3 8B, TP 8, 32,768 tokens, a server with Ascend 910B (simulated)",
    "results": "A layer of 8,192 tokens, simulated",
}


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
        draw(picture, _TITLES[name], options.folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
