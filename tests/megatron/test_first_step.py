"""What the first step of a model finds, and what is left of it when it fails or the model goes."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.pass_states import Census
from tests.megatron.models import RECOMPUTED, Case
from tests.megatron.training import Trainer, in_both_orders, layout, started

DENSE = Case(tensor=2, microbatches=2, options={"num_layers": 2})
DROPOUT = {"hidden_dropout": 0.1}


def draw_in_backwards(trainer: Trainer) -> None:
    """Gradients of each layer's norm are scaled by random numbers of Megatron's tracker."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            return gradient * (1 + torch.rand(1))

    for layer in trainer.models[0].module.decoder.layers:
        layer.input_layernorm.register_forward_hook(
            lambda _, __, output: output.register_hook(scale) and None
        )


def fail_once(trainer: Trainer) -> None:
    """The first step fails in its second micro-batch, and is tried again."""
    step = trainer.forward
    calls = [0]

    def forward(data: Any, model: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError
        return step(data, model)

    trainer.forward = forward
    with pytest.raises(MemoryError):
        trainer.accumulate()
    trainer.losses.clear()


def trained(rank: int, case: Case, change: Callable[[Trainer], None]) -> str:
    """What was printed, after a comparison of bits with a training without overlap."""

    def train() -> str:
        trainer = Trainer(case)
        change(trainer)
        return trainer.run(3)

    return in_both_orders(case, train)[1]


def test_a_backward_that_draws_runs_beside_no_forward(ranks: Any) -> None:
    first, _ = ranks(2).run(trained, DENSE.but(DROPOUT), draw_in_backwards)
    assert "no forward runs beside a backward: a backward draws random numbers" in first


def test_a_first_step_that_failed_is_watched_again(ranks: Any) -> None:
    first, _ = ranks(2).run(trained, DENSE.but(RECOMPUTED), fail_once)
    assert "1 of 2 forwards of stage 0 run beside a backward" in first


def freed(rank: int) -> bool:
    overlapping = Overlapping()
    with layout(DENSE), started(overlapping):
        trainer = Trainer(DENSE)
        trainer.run(2)
        model = weakref.ref(trainer.models[0])
        del trainer
        gc.collect()
    return model() is None


def test_a_model_that_is_no_longer_used_is_freed(ranks: Any) -> None:
    assert ranks(2).run(freed) == [True, True]


def test_the_census_sees_recomputations_after_many_points() -> None:
    """Layers that are not recomputed come first in a backward."""
    layer = torch.nn.Identity()
    layer.held = SimpleNamespace()
    layer.count = 0
    census = Census([layer], [])
    census.begin()
    for _ in range(50):
        census.look("backward")
    layer.count = 1
    census.look("recomputation")
    census.begin()
    layer.count = 2
    census.look("backward")
    assert census.written_by_both(["recomputation"], ["backward"]) == ["chunk 0, : Identity.count"]
