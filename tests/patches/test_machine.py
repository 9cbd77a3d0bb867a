"""Choices from the NPU's description when lanes are opened, and their log messages."""

import logging
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from commfuse_npu.ops import LinearOptions
from commfuse_npu.plan import Schedule, default_shape
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.training_options import LaunchSettings, register_wrappers
from mindspeed_patches.wrappers import LinearWrappers
from tests.patches.launches import real_arguments

A2, A3, OTHER = "Ascend910B1", "Ascend910_9391", "Ascend310P3"
LOGGER = "mindspeed_patches.wrappers"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """Creates wrappers of a launch whose lanes are open on NPUs of a name, or on a CPU."""

    def make(
        name: str | None, tp: int, options: str = "", post: float = 40e-6, **sizes: int
    ) -> LinearWrappers:
        def measured(lanes: object, schedule: Schedule) -> float:
            assert schedule.shape == default_shape(tp), "of what the layers post"
            return post

        monkeypatch.setattr(f"{LOGGER}.post_seconds", measured)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        device = SimpleNamespace(get_device_name=lambda: name)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
        usual = {"seq_length": 512, "micro_batch_size": 1, "hidden_size": 4096}
        args = real_arguments(*options.split(), tensor_model_parallel_size=tp, **usual | sizes)
        wrappers, _, _ = register_wrappers(PatchManager(), LaunchSettings(args))
        device_type = "npu" if name else "cpu"
        lanes = MagicMock(spec=Transport, size=tp, device_type=device_type, group=None)
        wrappers.transport = lanes
        wrappers.opened()
        return wrappers

    return make


def called(wrappers: LinearWrappers, rows: int, accumulates: bool = True) -> LinearOptions | str:
    """The options of a row-parallel layer with blocks of ``rows`` rows, or why it is not fused."""
    layer = SimpleNamespace(
        commfuse_layer="fc2", input_is_parallel=True, sequence_parallel=True, config=None,
        gradient_accumulation_fusion=accumulates, skip_bias_add=True, bias=None, weight=None,
    )  # fmt: skip
    wrappers.calls.clear()
    x = torch.empty(rows * wrappers.lanes().size, 1, device="meta")
    with patch(f"{LOGGER}.linear_reduce_scatter") as fused:
        wrappers.row_forward_wrapper(MagicMock(__name__="forward"))(layer, x)
    ((_, reason),) = wrappers.calls
    return fused.call_args.kwargs["options"] if reason == "fused" else reason


@pytest.mark.parametrize(
    ("name", "tp", "options", "hidden", "least", "collectives"),
    [
        (A2, 8, "", 4096, 640, 1734),
        (A2, 8, "", 8192, 512, 1734),
        (A3, 4, "", 4096, 781, 1686),
        (OTHER, 8, "", 4096, 0, None),
        (None, 8, "", 4096, 0, None),
        (A2, 8, "--commfuse-chunks 2", 4096, 0, 1734),
    ],
)
def test_layers_of_few_rows_stay_megatrons_on_a_described_npu(
    opened, name, tp, options, hidden, least, collectives
) -> None:
    wrappers = opened(name, tp, options, hidden_size=hidden)
    for accumulates in (False, True):
        options = called(wrappers, max(1, least), accumulates)
        assert isinstance(options, LinearOptions), options
        assert options.collectives_from == collectives
    if least:
        reason = str(called(wrappers, least - 1))
        assert reason.startswith(f"a block has fewer than {least} rows")


@pytest.mark.parametrize(
    ("post", "rows", "chunks"), [(8e-6, 512, 2), (128e-6, 2048, 2), (512e-6, 8192, 1)]
)
def test_what_a_post_costs_decides_on_rows_and_chunks(opened, caplog, post, rows, chunks) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        wrappers = opened(A2, 8, post=post, seq_length=8 * 4096)
    fused, left = called(wrappers, rows), called(wrappers, rows - 1)
    assert isinstance(left, str)
    assert isinstance(fused, LinearOptions), fused
    assert fused.schedule.chunks == chunks
    record, *_ = caplog.records
    assert record.getMessage().startswith(
        f"CommFuse: a post takes the slowest host {1e6 * post:.0f} us (measured): blocks of "
        f"{rows} rows or more are fused, in {chunks} chunks; "
    )
    given = called(opened(A2, 8, "--commfuse-chunks 4", post=post), rows)
    assert isinstance(given, LinearOptions), given
    assert given.schedule.chunks == 4
