"""What the description of the NPU decides when the lanes are there, and what is said about it."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.all_wrappers import register_wrappers
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.wrappers import LinearWrappers, Obstacle, with_way_out
from tests.patches.launches import real_arguments

A2, A3, OTHER = "Ascend910B1", "Ascend910_9391", "Ascend310P3"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """Wrappers of a launch whose lanes were made over NPUs of a name, or a CPU without one."""

    def make(
        name: str | None,
        tp: int,
        options: str = "",
        hidden: int = 4096,
        post: float = 40e-6,
        length: int = 512,
    ) -> LinearWrappers:
        monkeypatch.setattr("mindspeed_patches.wrappers.post_seconds", lambda _: post)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
        device = SimpleNamespace(get_device_name=lambda: name)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
        sizes = {"seq_length": length, "micro_batch_size": 1, "hidden_size": hidden}
        args = real_arguments(*options.split(), tensor_model_parallel_size=tp, **sizes)
        wrappers, _, _ = register_wrappers(PatchManager(), commfuse_options(args))
        device_type = "npu" if name else "cpu"
        wrappers.transport = MagicMock(spec=Transport, size=tp, device_type=device_type)
        wrappers.opened()
        return wrappers

    return make


def obstacle(wrappers: LinearWrappers, rows: int) -> str | None:
    """Of a row-parallel layer whose ranks have blocks of so many rows."""
    layer = SimpleNamespace(commfuse_layer="fc2", input_is_parallel=True, config=None)
    return wrappers._obstacle(layer, column=False, rows=rows)


@pytest.mark.parametrize(
    ("name", "tp", "options", "least"),
    [
        (A2, 8, "", 640),
        (A3, 4, "", 781),
        (OTHER, 8, "", 0),
        (None, 8, "", 0),
        (A2, 8, "--commfuse-min-rows 0", 0),
        (A2, 8, "--commfuse-chunks 2", 0),
        (None, 8, "--commfuse-min-rows 64", 64),
        (A2, 8, "--commfuse-collectives-from never", 640),
    ],
)
def test_blocks_of_few_rows_stay_megatrons_on_a_described_npu(
    opened, name: str | None, tp: int, options: str, least: int
) -> None:
    wrappers = opened(name, tp, options)
    assert obstacle(wrappers, max(1, least)) is None
    if least:
        said = f"a block has fewer rows than the {least} of --commfuse-min-rows"
        assert obstacle(wrappers, least - 1) == said


def test_wide_layers_are_fused_in_shorter_blocks(opened) -> None:
    wrappers = opened(A2, 8, hidden=8192)
    assert [obstacle(wrappers, rows) is None for rows in (512, 511)] == [True, False]


@pytest.mark.parametrize(
    ("post", "rows", "chunks"), [(8e-6, 512, 2), (128e-6, 2048, 2), (512e-6, 8192, 1)]
)
def test_what_a_post_costs_decides_on_rows_and_chunks(opened, caplog, post, rows, chunks) -> None:
    with caplog.at_level(logging.INFO, "mindspeed_patches.wrappers"):
        wrappers = opened(A2, 8, post=post, length=8 * 4096)
    assert [obstacle(wrappers, n) is None for n in (rows, rows - 1)] == [True, False]
    assert wrappers._options[True].schedule.chunks == chunks
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"CommFuse: a post keeps the slowest host for {1e6 * post:.0f} us (measured): blocks of "
        f"{rows} rows or more are fused, in {chunks} chunks; "
    )
    said = opened(A2, 8, "--commfuse-chunks 4", post=post)
    assert said._options[True].schedule.chunks == 4


@pytest.mark.parametrize(("name", "least"), [(A2, 1734), (OTHER, None), (None, None)])
def test_collectives_stay_where_the_description_says_it(opened, name, least) -> None:
    assert opened(name, 8)._options[False].collectives_from == least
    assert opened(A2, 8, "--commfuse-collectives-from 9")._options[True].collectives_from == 9


def test_the_machines_limit_is_told_with_its_reason_and_the_way_out(opened, caplog) -> None:
    wrappers = opened(A2, 8)
    reason = obstacle(wrappers, 64)
    assert with_way_out(reason or "") == (
        "a block has fewer rows than the 640 of --commfuse-min-rows (Megatron's own order is "
        "faster then (simulated); --commfuse-min-rows 0 fuses it, a smaller TP or longer sequences "
        "lengthen it)"
    )
    with caplog.at_level(logging.INFO, "mindspeed_patches.wrappers"):
        for _ in range(2):
            wrappers.leave("qkv", reason)
    assert [record.getMessage() for record in caplog.records] == [
        f"CommFuse leaves qkv to Megatron: {with_way_out(reason or '')}"
    ]
    asked = obstacle(opened(None, 8, "--commfuse-min-rows 65"), 64)
    assert "simulated" not in with_way_out(asked or "")


def test_a_reason_is_counted_as_its_text_and_keeps_its_way_out() -> None:
    assert Counter([Obstacle("why", "do it"), "why", Obstacle("why")]) == {"why": 3}
    reason = pickle.loads(pickle.dumps(Obstacle("why", "do it")))
    assert (reason, with_way_out(reason)) == ("why", "why (do it)")
    assert with_way_out(Obstacle("why")) == with_way_out("why") == "why"
