"""The launch's limit on the rows of a block is where Megatron's order stops being faster."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import least_rows, usual_chunks
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.cover import covering_outputs
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, best_lanes, training
from commfuse_npu.tools.simulate.variants import Variant, direct, fused


@pytest.mark.parametrize("model", ["llama2_7b", "llama3_8b", "llama3_70b"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("machine", ["ascend_910b_server", "ascend_910c_supernode"])
def test_below_it_megatrons_order_is_faster_and_from_it_on_it_is_not(machine, tp, model) -> None:
    hardware = Hardware.load(find_config(machine, "hardware"))
    figures = hardware.machine()

    def compared(rows: int) -> float:
        """A layer's time as a launch without options fuses it, over that in Megatron's order."""
        options = Options(micro_batch=1, micro_batches=1)
        described = ModelConfig.load(find_config(model))
        step = Step(figures, training(described, Layout(tp, 1, 1, 1), rows * tp, options))
        lanes, chunks = best_lanes(hardware, tp), usual_chunks(tp, rows)
        least = covering_outputs(figures, tp)
        ours, megatron = (
            sum(step.layer(one, half).seconds for half in ("forward", "backward"))
            for one in (
                fused(direct(tp, tp), lanes, chunks, collectives_from=least),
                Variant("megatron", "megatron"),
            )
        )
        return ours / megatron

    limit = least_rows(tp)
    assert compared(limit) < 1.02
    assert compared(limit // 2) > 0.97
    assert compared(limit // 4) > 1
