"""The launch's defaults post so little that a slow host does not make them slower than Megatron's.

From the limit on the rows of a block they are at most 3 % slower than Megatron's order wherever a
post costs up to 40 us; below it Megatron's order is faster, or as fast.
"""

from __future__ import annotations

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import covering_outputs
from commfuse_npu.plan import least_rows, usual_chunks
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, best_lanes, training
from commfuse_npu.tools.simulate.variants import Variant, direct, fused

MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
SLOW = 40e-6
"""Seconds of a post."""


def compared(machine: str, model: str, tp: int, rows: int, post: float) -> float:
    """A layer as a launch without options fuses it at any length, over Megatron's order."""
    hardware = Hardware.load(find_config(machine, "hardware")).posting(post)
    options = Options(micro_batch=1, micro_batches=1)
    described = ModelConfig.load(find_config(model))
    figures = hardware.machine()
    step = Step(figures, training(described, Layout(tp, 1, 1, 1), rows * tp, options))
    chunks = usual_chunks(tp, rows, described.hidden_size)
    least = covering_outputs(figures, tp)
    ours = fused(direct(tp, tp), best_lanes(hardware, tp), chunks, collectives_from=least)
    megatron = Variant("megatron", "megatron")
    return step.layer_time(ours).seconds / step.layer_time(megatron).seconds


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_below_it_megatrons_order_is_faster_and_from_it_on_it_is_not(machine, tp, model) -> None:
    limit = least_rows(tp, ModelConfig.load(find_config(model)).hidden_size)
    for times in (1, 2, 4):
        assert compared(machine, model, tp, times * limit, SLOW) < 1.03, times
    for part in (2, 4):
        assert compared(machine, model, tp, limit // part, SLOW) > 1, part


@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b"])
@pytest.mark.parametrize("microseconds", [15, 25, 40])
def test_the_default_is_not_slower_whatever_a_post_costs(model: str, microseconds: int) -> None:
    for rows in (1024, 2048, 4096):
        assert compared(MACHINES[0], model, 8, rows, microseconds * 1e-6) < 0.98, rows
