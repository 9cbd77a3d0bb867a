"""Draw docs/results.svg: how much less time a layer takes in each form, simulated.

Six layouts of 8,192 tokens, forward and backward, against blocking collectives, at typical figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.report.charts import heat
from commfuse_npu.tools.report.drawing import draw
from scripts.evidence.layers import point

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


def main(argv: Sequence[str]) -> int:
    """Simulate and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "results.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out = parser.parse_args(argv).out
    cells = []
    for machine, model, tp in _LAYOUTS:
        shares = point(machine, model, tp, 8192, corners=1).shares[0]
        layout = f"{_MODELS[model]}, TP {tp}, {_MACHINES[machine]}"
        cells += [
            (_FORMS[form], layout, 100 * (1 - shares[form])) for form in _FORMS if form in shares
        ]
    title = "% less time per layer than with blocking collectives"
    draw([heat(title, "form", cells)], "A layer of 8,192 tokens, simulated", out)
    return 0
