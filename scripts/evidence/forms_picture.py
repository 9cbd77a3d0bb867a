"""Draw docs/forms.svg: one layer on one rank, simulated, in four forms on one axis of time.

Llama 3 8B, TP 8, 32,768 tokens, the server with Ascend 910B at typical figures: forward, then
backward, of a layer among many; overlapped, the layer of a forward beside that of a backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.report.drawing import draw
from commfuse_npu.tools.simulate.page import layer_picture
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, best_lanes, training
from commfuse_npu.tools.simulate.variants import (
    MEGATRON,
    REFERENCE,
    TURNS,
    Variant,
    direct,
    fused,
)

__all__ = ["forms", "main", "step"]

_HARDWARE, _MODEL, _TP, _TOKENS = "ascend_910b_server", "llama3_8b", 8, 32768
_TITLE = "Llama 3 8B, TP 8, 32,768 tokens, a server with Ascend 910B (simulated)"


def step() -> Step:
    """What is drawn."""
    hardware = Hardware.load(find_config(_HARDWARE, "hardware"))
    one = Options(micro_batch=1, micro_batches=1)
    what = training(ModelConfig.load(find_config(_MODEL)), Layout(_TP, 1, 1, 1), _TOKENS, one)
    return Step(hardware.machine(), what)


def forms() -> dict[str, Variant]:
    """By title."""
    hardware = Hardware.load(find_config(_HARDWARE, "hardware"))
    ours = fused(direct(_TP, _TP), best_lanes(hardware, _TP), (1, 2, 3, 4, 6))
    return {
        "plain collectives": REFERENCE,
        "Megatron's order": MEGATRON,
        "fused layers (tuned)": ours,
        "forward-backward overlap, side by side": TURNS,
    }


def main(argv: Sequence[str]) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "forms.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    draw([layer_picture(step(), forms())], _TITLE, parser.parse_args(argv).out)
    return 0
