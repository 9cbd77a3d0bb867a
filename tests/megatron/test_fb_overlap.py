"""Settings and pipelines that an overlapped schedule does not support are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.core_versions import obstacle
from tests.megatron.training import Case, Trainer, layout

NAMED = {
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "hybrid_context_parallel": True,
    "enable_cuda_graph": True,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "tp_comm_overlap": True,
    "symmetric_ar_type": "one_shot",
}


class TransformerEngines(torch.nn.Linear):
    __module__ = "transformer_engine.pytorch"


def test_settings_that_exclude_it_are_named() -> None:
    model, low = torch.nn.Sequential(TransformerEngines(1, 1)), {"fp8": "hybrid", "fp4": "hybrid"}
    for name, value in (NAMED | low).items():
        reason = obstacle({}, [model], SimpleNamespace(**{name: value}))
        assert str(reason).startswith(f"{name}: ")
    disabled = dict.fromkeys(NAMED, False) | {"cuda_graph_impl": "none"}
    assert obstacle({}, [model], SimpleNamespace(**disabled)) is None
    assert obstacle({}, [], SimpleNamespace(**disabled | low)) is None


def of_pipelines(rank: int, chunks: int, microbatches: int) -> str | None:
    """The obstacle of a pipeline of two stages, if any."""
    from megatron.core.pipeline_parallel import schedules

    case = Case(stages=2, chunks=chunks)
    with layout(case):
        step = {"model": Trainer(case).models, "num_microbatches": microbatches}
        return Overlapping()._obstacle(schedules.get_forward_backward_func(), step)


def test_pipelines_that_cannot_be_overlapped_are_named(ranks: Any) -> None:
    plain = ranks(2).run(of_pipelines, 1, 4)
    assert all("up to 3 micro-batches" in text and "plain_pipelines=True" in text for text in plain)
    odd = ranks(2).run(of_pipelines, 2, 5)
    assert all("5 micro-batches are not a multiple of the 2 stages" in text for text in odd)
    assert ranks(2).run(of_pipelines, 2, 4) == [None, None]
