"""What the description of the NPU decides when the lanes are there, and what is said about it."""

from __future__ import annotations

import logging
import types
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.all_wrappers import register_wrappers
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.obstacles import told
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.wrappers import LinearWrappers
from tests.patches.launches import real_arguments

A2, A3, OTHER = "Ascend910B1", "Ascend910_9391", "Ascend310P3"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """Wrappers of a launch whose lanes were made over NPUs of a name, or a CPU without one."""

    def make(name: str | None, tp: int, *options: str, rank: int = 0, **sizes: int):
        device = types.SimpleNamespace(get_device_name=lambda: name)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        args = real_arguments(
            *options,
            transformer_impl="local",
            tensor_model_parallel_size=tp,
            **{"seq_length": 512, "micro_batch_size": 1, "hidden_size": 4096} | sizes,
        )
        wrappers, _, _ = register_wrappers(PatchManager(), commfuse_options(args))
        wrappers.transport = SimpleNamespace(size=tp, device_type="npu" if name else "cpu")  # type: ignore[assignment]
        wrappers.opened()
        return wrappers

    return make


def obstacle(wrappers: LinearWrappers, rows: int) -> str | None:
    """Of a row-parallel layer whose ranks have blocks of so many rows."""
    layer = SimpleNamespace(
        commfuse_layer="fc2",
        weight=torch.empty(4, 4),
        input_is_parallel=True,
        sequence_parallel=True,
        is_expert=False,
        config=SimpleNamespace(),
    )
    return wrappers._row_call_obstacle(layer, torch.empty(rows * wrappers.lanes().size, 1, 4))


@pytest.mark.parametrize(
    ("name", "tp", "options", "least"),
    [
        (A2, 8, "", 1024),
        (A3, 4, "", 512),
        (A2, 2, "", 256),
        (OTHER, 8, "", 0),
        (None, 8, "", 0),
        (A2, 8, "--commfuse-min-rows 0", 0),
        (A2, 8, "--commfuse-chunks 2", 0),
        (None, 8, "--commfuse-min-rows 64", 64),
        (A2, 8, "--commfuse-collectives-from never", 1024),
    ],
)
def test_blocks_of_few_rows_stay_megatrons_on_a_described_npu(
    opened, name: str | None, tp: int, options: str, least: int
) -> None:
    wrappers = opened(name, tp, *options.split())
    assert obstacle(wrappers, max(1, least)) is None
    if least:
        # Each call by its own shape: sequences may vary in length.
        said = f"a block has fewer rows than the {least} of --commfuse-min-rows"
        assert obstacle(wrappers, least - 1) == said


def test_wide_layers_are_fused_in_shorter_blocks(opened) -> None:
    wrappers = opened(A2, 8, hidden_size=8192)
    assert obstacle(wrappers, 512) is None
    assert obstacle(wrappers, 511) is not None


@pytest.mark.parametrize(("name", "least"), [(A2, 1734), (OTHER, None), (None, None)])
def test_collectives_stay_where_the_description_says_it(opened, name, least) -> None:
    options = opened(name, 8)._options[False]
    assert options.collectives_from == least
    assert opened(A2, 8, "--commfuse-collectives-from", "9")._options[True].collectives_from == 9


def test_the_machines_limit_is_told_with_its_reason_and_the_way_out(opened) -> None:
    reason = obstacle(opened(A2, 8), 64)
    assert told(reason or "") == (
        "a block has fewer rows than the 1024 of --commfuse-min-rows (Megatron's own order is "
        "faster then (simulated); --commfuse-min-rows 0 fuses it, a smaller TP or longer sequences "
        "lengthen it)"
    )
    asked = obstacle(opened(None, 8, "--commfuse-min-rows", "65"), 64)
    assert "simulated" not in told(asked or "")


def test_a_short_call_of_a_longer_launch_is_named(opened, caplog) -> None:
    wrappers = opened(A2, 8, seq_length=4096)
    reason = obstacle(wrappers, 64)
    assert reason is not None
    with caplog.at_level(logging.INFO, "mindspeed_patches.wrappers"):
        for _ in range(2):
            wrappers.leave("qkv", reason)
    assert [record.getMessage() for record in caplog.records] == [
        f"CommFuse leaves qkv to Megatron: {told(reason)}"
    ]
