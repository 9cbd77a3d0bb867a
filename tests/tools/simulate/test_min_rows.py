"""The defaults post so little that even a slow host does not make them slower than Megatron.

From the limit on the rows of a block they are at most 4 % slower than Megatron's order; below it
Megatron's order is faster, or as fast.
"""

import pytest

from commfuse_npu.plan import Schedule, default_chunks, default_shape, min_rows_to_fuse
from commfuse_npu.plan.defaults import POST_SECONDS
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import min_outputs_to_hide
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Layout, training
from commfuse_npu.tools.simulate.variants import MEGATRON, fused

MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
HOSTS = {118e-6: 128e-6, 15e-6: 40e-6}
"""Seconds of a launch: seconds of a post."""


def compared(machine: str, model: str, tp: int, rows: int, launch: float) -> float:
    """Time of a layer with default options, fused at any length, over that in Megatron's order."""
    post = HOSTS[launch]
    hardware = Hardware.find(machine).launching(launch).posting(post)
    described = ModelConfig.load(find_config(model))
    figures = hardware.machine()
    sizes = Layout(tp, 1, 1, 1)
    step = TrainingStep(
        figures, training(described, sizes, rows * tp, micro_batch=1, micro_batches=1)
    )
    shape, chunks = default_shape(tp), default_chunks(tp, rows, described.hidden_size, post)
    lanes, outputs = Schedule(shape).lanes_for(tp), min_outputs_to_hide(figures, tp)
    ours = fused(Schedule(shape, lanes, chunks), collectives_from=outputs)
    return step.layer_time(ours).seconds / step.layer_time(MEGATRON).seconds


@pytest.mark.parametrize("launch", HOSTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_from_the_limit_on_the_default_is_not_slower(machine, tp, model, launch) -> None:
    described = Hardware.find(machine)
    assert described.typical("host.post_overhead") == POST_SECONDS, "of one that is not measured"
    hidden = ModelConfig.load(find_config(model)).hidden_size
    limit = min_rows_to_fuse(tp, hidden, HOSTS[launch])
    for times in (1, 2, 4):
        assert compared(machine, model, tp, times * limit, launch) < 1.04, times
    if launch == max(HOSTS):
        assert compared(machine, model, tp, limit // 4, launch) > 1
