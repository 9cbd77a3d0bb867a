"""Trainings of Megatron's GPT on core 0.12 to 0.19 end with the weights of its own order.

To check a version: ``pip install --no-deps megatron-core==0.16.1``, and this file::

    pytest tests/megatron/test_fb_overlap.py
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.core_versions import StepLayout, alone, obstacle
from tests.megatron.cores import (
    DROPOUT,
    EP,
    FREED,
    LAYERS,
    PP,
    TP,
    VPP,
    Ran,
    compare,
)
from tests.megatron.models import DISTRIBUTED, RECOMPUTED, Case
from tests.megatron.training import Trainer, layout, started

TRAININGS = {
    "TP 2, no type": TP.but({"sequence_parallel": False}, typed=False),
    "TP 2, SP, recomputed dropout": TP.but(RECOMPUTED | DROPOUT),
    "EP 2, recomputed, distributed optimizer": EP.but(RECOMPUTED),
    "PP 2": PP,
    "PP 2, distributed optimizer": replace(PP, microbatches=4, options=LAYERS | DISTRIBUTED),
    "PP 2 x VPP 2, outputs freed": VPP.but(FREED),
    "PP 2 x VPP 2, distributed optimizer": VPP.but(DISTRIBUTED),
}
LONG = {
    "PP 2 x TP 2, SP, groups passed": replace(TP, stages=2, microbatches=6, groups=True),
    "PP 2 x VPP 2 x TP 2, SP": replace(VPP, tensor=2),
    "PP 2 x VPP 2, EP 2, distributed optimizer": EP.but({"num_layers": 4}, stages=2, chunks=2),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in TRAININGS.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_weights_of_megatrons_own_order(ranks: Any, case: Case) -> None:
    for ran in ranks(case.size).run(compare, case):
        assert ran.pairs > 0, ran.printed


@pytest.mark.parametrize(("overlapped", "pairs"), [(1.5, 5 * 3), (2.5, 0)])
def test_overlap_is_off_on_all_ranks_where_it_is_slower(
    ranks: Any, overlapped: float, pairs: int
) -> None:
    """The 3rd, 5th and 7th of nine steps, in Megatron's order, take 2 s; the others on rank 1
    ``overlapped`` s in the median."""
    first, second = ranks(2).run(timed, overlapped)
    assert first.pairs == second.pairs == pairs
    assert "3 of 4 forwards of stage 0 run beside a backward" in first.printed
    assert "the activations of at most 2 forwards, instead of 1\n" in first.printed
    assert "up to 5 weight gradients of a micro-batch are computed during" in first.printed
    figures = f"a step takes {1000 * overlapped:.1f} ms, 2000.0 ms in Megatron's order"
    assert (f"off: {figures}" in first.printed) is (pairs == 0)
    assert figures in first.printed


def timed(rank: int, overlapped: float) -> Ran:
    own = overlapped if rank else 0.5
    clock = [0.0]
    for seconds in (9.0, 2.0, own, 2.0, 9.0, 1.0, 0.1):
        clock += [clock[-1] + seconds] * 2
    return compare(rank, TP.but({"num_layers": 1}), steps=9, clock=clock[:-1])


def swapped(rank: int) -> set[str]:
    """Names of attributes that passes swap."""
    overlapping = Overlapping()
    with layout(TP), started(overlapping):
        Trainer(TP).step()
    assert overlapping.overlap is not None
    return {name for state in overlapping.overlap.states for name in getattr(state, "_names", ())}


def test_only_what_passes_write_is_swapped(ranks: Any) -> None:
    """Not the collectives that the first pass wraps, in modules that imported them."""
    for names in ranks(2).run(swapped):
        assert "states_" in names
        assert not [name for name in names if name.startswith(("dist_", "__"))]


NAMED = {
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "hybrid_context_parallel": True,
    "enable_cuda_graph": True,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "tp_comm_overlap": True,
    "symmetric_ar_type": "one_shot",
    "moe_paged_stash": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
}


class TransformerEngines(torch.nn.Linear):
    __module__ = "transformer_engine.pytorch"


class FSDPModule(torch.nn.Linear):
    """A module that torch's ``fully_shard`` has changed is of a class with this name, too."""

    def __init__(self) -> None:
        super().__init__(1, 1)


def test_settings_that_exclude_it_are_named() -> None:
    model, low = torch.nn.Sequential(TransformerEngines(1, 1)), {"fp8": "hybrid", "fp4": "hybrid"}
    for name, value in (NAMED | low).items():
        reason = obstacle([model], SimpleNamespace(**{name: value}))
        assert str(reason).startswith(f"{name}: ")
    for backend in ("hybridep", "ncclep"):
        flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        reason = obstacle([], SimpleNamespace(**flex))
        assert reason == f"moe_flex_dispatcher_backend: {backend} has one buffer for all layers"
    sharded = obstacle([], SimpleNamespace(gtp_weight_remat_size=2))
    assert str(sharded).startswith("gtp_weight_remat_size: it gathers weights ahead")
    assert str(obstacle([FSDPModule()], SimpleNamespace())).startswith("FSDPModule: ")
    disabled = dict.fromkeys(NAMED, False) | {"cuda_graph_impl": "none"}
    disabled |= {"gtp_weight_remat_size": 1, "moe_flex_dispatcher_backend": "deepep"}
    assert obstacle([model], SimpleNamespace(**disabled)) is None
    assert obstacle([], SimpleNamespace(**disabled | low)) is None


def test_steps_that_exclude_pairs_are_named(one_rank: None) -> None:
    """The groups of a caller without a pipeline need no group of stages."""
    model, group = torch.nn.Linear(1, 1), torch.distributed.group.WORLD
    model.model_type = None
    step = {"model": [model, model], "num_microbatches": 4}
    step["pg_collection"] = SimpleNamespace(tp=group, cp=group)
    layout = StepLayout(step)
    assert (layout.stages, layout.stage, layout.pipeline) == (1, 0, None)
    model.config = config = SimpleNamespace(
        microbatch_group_size_per_vp_stage=1, variable_seq_lengths=False, mtp_standalone=False
    )
    assert alone(layout) is None
    reason = alone(StepLayout(step | {"novelty": 1}))
    assert str(reason).startswith("novelty: this argument of Megatron's schedule is not known")
    for name in ("variable_seq_lengths", "mtp_standalone"):
        with mock.patch.object(config, name, True):
            assert str(alone(layout)).startswith(f"{name}: neighbors exchange")


@pytest.mark.parametrize(
    ("sharding", "experts", "joined"),
    [({}, None, False), ({}, 8, True), ({"overlap_grad_reduce": True}, None, True),
     ({"overlap_param_gather": True}, None, True)],
)  # fmt: skip
def test_replicas_are_joined_by_buckets_or_experts(
    one_rank: None, sharding: dict[str, bool], experts: int | None, joined: bool
) -> None:
    """Either has collectives among all ranks of a stage while passes run."""
    world = torch.distributed.group.WORLD
    model: Any = torch.nn.Linear(1, 1)
    none = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    model.ddp_config = SimpleNamespace(**none | sharding)
    model.config = SimpleNamespace(num_moe_experts=experts)
    groups = SimpleNamespace(tp=world, cp=world, tp_dp_cp=world)
    step = {"model": model, "pg_collection": groups}
    assert (StepLayout(step).joined_replicas() is world) == joined


def of_pipelines(rank: int, chunks: int, microbatches: int) -> str | None:
    """The obstacle of a pipeline of two stages, if any."""
    from megatron.core.pipeline_parallel import schedules

    case = Case(stages=2, chunks=chunks)
    with layout(case):
        step = {"model": Trainer(case).models, "num_microbatches": microbatches}
        return Overlapping()._alone(schedules.get_forward_backward_func(), StepLayout(step))


def test_pipelines_that_cannot_be_overlapped_are_named(ranks: Any) -> None:
    plain = ranks(2).run(of_pipelines, 1, 4)
    assert all(
        "up to 3 micro-batches" in text and "overlap-memory allows" in text for text in plain
    )
    odd = ranks(2).run(of_pipelines, 2, 5)
    assert all("5 micro-batches are not a multiple of the 2 stages" in text for text in odd)
    assert ranks(2).run(of_pipelines, 2, 4) == [None, None]
