"""A layer as lanes, without holes or overlaps."""

from __future__ import annotations

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, of_hardware, training


@pytest.fixture(scope="module")
def step() -> Step:
    hardware = Hardware.load(find_config("ascend_910b_server", "hardware"))
    model = ModelConfig.load(find_config("llama3_8b"))
    return Step(hardware.machine(), training(model, Layout(4, 1, 1, 1), 4096, Options()))


@pytest.mark.parametrize("wanted", ["plain-mesh", "megatron", "commfuse-c4-l3", "commfuse-fb"])
def test_work_and_waiting_fill_the_compute_lane(step: Step, wanted: str) -> None:
    hardware = Hardware.load(find_config("ascend_910b_server", "hardware"))
    every = of_hardware(hardware, Layout(4, 1, 1, 1), Options())
    variant = next(one for one in every if one.name == wanted)
    played = step.parts(variant)
    row = lanes(wanted, played)
    end = 1e3 * sum(one.seconds for _, one in played)
    at = 0.0
    for bit in sorted((b for b in row.bits if b.lane == "compute"), key=lambda bit: bit.start):
        assert bit.start == pytest.approx(at, abs=1e-5), bit
        at = bit.end
    assert at == pytest.approx(end)
    waited = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
    assert 0 < waited < end
    assert row.said == f"{wanted}: {end:.1f} ms, waiting {waited:.1f} ms"
    sent = [bit for bit in row.bits if bit.lane == "links"]
    assert {bit.kind for bit in sent} == {"transfer"}
    # Whatever goes to several peers at once is one bit.
    if wanted == "commfuse-c4-l3":
        assert {"forward: qkv chunk 0", "backward: fc2 backward chunk 3"} <= {b.name for b in sent}
