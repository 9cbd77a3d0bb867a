"""What a training step needs of an NPU's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import Footprint, footprint
from commfuse_npu.tools.simulate.step import Recompute
from commfuse_npu.tools.simulate.sweep import Layout, Options, training
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant, direct, fused

MODEL = ModelConfig.load(find_config("llama2_7b"))
HARDWARE = Hardware.load(find_config("ascend_910b_roce", "hardware"))
H, F, LAYERS, VOCABULARY = 4096, 11008, 32, 32000


def of(
    layout: Layout, variant: Variant = REFERENCE, recompute: Recompute = "none", **options: int
) -> Footprint:
    given = Options(recompute=recompute, **options)
    return footprint(training(MODEL, layout, 4096, given), variant, HARDWARE)


def test_one_npu_holds_everything() -> None:
    one = of(Layout(1, 1, 1, 1), micro_batch=1, micro_batches=4)
    parameters = LAYERS * (4 * H * H + 3 * H * F + 2 * H) + 2 * VOCABULARY * H
    assert one.weights == 2 * parameters
    assert one.gradients == 4 * parameters
    assert one.optimizer == 12 * parameters
    assert one.communication == 0
    # 34 s b h with a GELU of 4 H (Korthikanti and others, 2022); here SwiGLU of 2.69 H.
    layer = 4096 * (2 * (5 * H + 3 * H + 3 * F) + 64 * 32)
    assert one.activations == LAYERS * layer + 10 * 4096 * VOCABULARY


def test_every_size_divides_what_it_should() -> None:
    one = of(Layout(1, 1, 1, 1), micro_batch=1, micro_batches=8)
    tp = of(Layout(8, 1, 1, 1), micro_batch=1, micro_batches=8)
    for part in ("weights", "gradients", "optimizer", "activations"):
        assert getattr(tp, part) == pytest.approx(getattr(one, part) / 8)
    dp = of(Layout(1, 1, 8, 1), micro_batch=1, micro_batches=8)
    assert (dp.weights, dp.activations) == (one.weights, one.activations)
    assert dp.optimizer == one.optimizer / 8
    cp = of(Layout(1, 2, 1, 1), micro_batch=1, micro_batches=8)
    assert cp.activations == one.activations / 2
    # The first of four stages holds four micro-batches of a quarter of the layers.
    pp = of(Layout(1, 1, 1, 4), micro_batch=1, micro_batches=8)
    assert pp.activations == pytest.approx(one.activations - 10 * 4096 * VOCABULARY)
    assert pp.weights < one.weights / 3


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    none, full = (
        of(Layout(1, 1, 1, 1), micro_batch=1, micro_batches=1, recompute=choice)
        for choice in ("none", "full")
    )
    inputs = LAYERS * 4096 * 2 * H
    layer = (none.activations - 10 * 4096 * VOCABULARY) / LAYERS
    assert full.activations == inputs + layer + 10 * 4096 * VOCABULARY


def test_lanes_cost_communicators() -> None:
    layout, base = Layout(8, 1, 1, 1), direct(8, 8)
    few, many = (of(layout, fused(base, lanes, 1)).communication for lanes in (1, 7))
    # Each has two buffers, of the size of its messages; more is in flight, too.
    assert many - few >= 6 * 2 * 16 * 2**20
    assert many - few < HARDWARE.typical("host.communicator_bytes")


def test_the_fullest_stage_counts() -> None:
    uneven = replace(MODEL, pipeline_model_parallel_size=2, num_layer_list=(8, 24))
    even = replace(uneven, num_layer_list=None)
    layout, options = Layout(1, 1, 1, 2), Options(micro_batch=1, micro_batches=1)
    more, less = (
        footprint(training(m, layout, 4096, options), REFERENCE, HARDWARE) for m in (uneven, even)
    )
    assert more.weights > less.weights
