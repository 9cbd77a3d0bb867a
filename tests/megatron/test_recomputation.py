"""Recomputations run ahead, and leave out the last GEMM and its transfer, with Megatron's bits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.recomputation import Recomputation
from tests.megatron.models import EXPERTS, RECOMPUTED, Case, settings
from tests.megatron.training import Trainer, layout, patched, started

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYERS, MICROBATCHES = 3, 2
DENSE = Case(tensor=2, microbatches=MICROBATCHES, options=RECOMPUTED | {"num_layers": LAYERS})
SCATTER, REDUCE = "c10d::_reduce_scatter_base_", "c10d::allreduce_"
BLOCK = {"recompute_method": "block", "recompute_num_layers": 2}
CASES = {
    "two layers a checkpoint, dropout": (
        DENSE.but(DROPOUT | {"recompute_num_layers": 2, "num_layers": 4}),
        SCATTER,
        2,
    ),
    "block": (DENSE.but(BLOCK), SCATTER, 2),
    "one micro-batch, no SP": (
        replace(DENSE.but({"sequence_parallel": False}), microbatches=1),
        REDUCE,
        LAYERS,
    ),
    "PP 2": (replace(DENSE.but({"num_layers": 4}), stages=2), SCATTER, 2),
    "shared experts": (DENSE.but(EXPERTS), SCATTER, LAYERS),
}
"""Layouts, the collective that is left out, and the number of checkpoints in a chain."""


def trained(case: Case) -> tuple[str, Counter[str]]:
    """Bits after three steps, and the operators of the last one in all threads."""
    trainer = Trainer(case)
    first = trainer.run(2)
    threads = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=threads) as profile:
        bits = first + trainer.run(1)
    # Only names are needed; torch's own tables take seconds.
    return bits, Counter(event.name() for event in profile.profiler.kineto_results.events())


def compare(rank: int, case: Case) -> tuple[Counter[str], int]:
    """The operators that a step leaves out, after a comparison of all bits, and how many
    recomputations ran ahead in the second and third step."""
    overlapping = Overlapping()
    with layout(case):
        own, megatrons = trained(case)
        without_check = mock.patch.object(ForwardBackwardOverlap, "check")  # has all-reduces
        with started(overlapping), without_check:
            ours, left = trained(case)
    assert ours == own
    return megatrons - left, overlapping.recomputation.ahead.count


@pytest.mark.parametrize(("case", "collective", "count"), CASES.values(), ids=CASES)
def test_recomputations_run_ahead_without_the_last_gemm(
    ranks: Any, case: Case, collective: str, count: int
) -> None:
    checkpoints = case.microbatches * count
    for missing, ahead in ranks(case.size).run(compare, case):
        assert missing[collective] == missing["aten::mm"] == checkpoints
        assert ahead == 2 * case.microbatches * (count - 1)


def test_nothing_is_left_out_when_turned_off(ranks: Any) -> None:
    for missing in ranks(2).run(turned_off):
        assert not missing["aten::mm"]


def turned_off(rank: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMFUSE_OVERLAP", "0")
        return compare(rank, DENSE)[0]


def without_tensors(rank: int) -> float:
    """The result of a checkpoint that gets no tensor."""
    from megatron.core import tensor_parallel

    overlapping = Overlapping()
    with layout(DENSE), started(overlapping):
        result: torch.Tensor = tensor_parallel.checkpoint(lambda: torch.ones(()), False)
    return result.item()


def test_a_checkpoint_may_get_no_tensor(ranks: Any) -> None:
    assert ranks(2).run(without_tensors) == [1.0, 1.0]


def other_number(rank: int) -> str:
    """The error of a checkpoint that recomputes fewer layers than its forward called."""
    from megatron.core import tensor_parallel

    recomputation = Recomputation()
    overlapping = Overlapping()
    overlapping.recomputation = recomputation
    with layout(DENSE), started(overlapping):
        layers = Trainer(DENSE).models[0].module.decoder.layers
        rows = [layer.mlp.linear_fc2 for layer in layers]
        count = [len(rows)]

        def function(x: torch.Tensor) -> torch.Tensor:
            for row in rows[: count[0]]:
                x = x + row(x.repeat(2, 1, 1))[0]
            return x

        def train(recomputed: int) -> None:
            x = torch.randn(8, 2, 32, requires_grad=True)
            count[0] = 3
            y = tensor_parallel.checkpoint(function, False, x)
            count[0] = recomputed
            y.sum().backward()

        with recomputation.leaving_out([]):
            train(recomputed=3)
            train(recomputed=3)
            with pytest.raises(RuntimeError) as error:
                train(recomputed=1)
    return str(error.value)


def test_another_number_of_layers_is_refused(ranks: Any) -> None:
    for error in ranks(2).run(other_number):
        assert "called 1 row-parallel layers" in error
        assert "the same checkpoint 3" in error


class Tail(torch.nn.Module):
    """A row-parallel layer and a residual; the gradient of ``scale`` reads the layer's result."""

    def __init__(self, config: Any) -> None:
        from megatron.core.tensor_parallel import RowParallelLinear

        super().__init__()
        self.row = RowParallelLinear(
            8,
            8,
            config=config,
            init_method=torch.nn.init.normal_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.scale = torch.nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.row(x.tanh())[0] * self.scale


def by_default_argument(layer: Tail) -> Callable[..., torch.Tensor]:
    return lambda x, layer=layer: layer(x)


def by_list(layer: Tail) -> Callable[..., torch.Tensor]:
    layers = [layer]
    return lambda x: layers[0](x)


class Call:
    def __init__(self, layer: Tail) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def gradients(function_of: Callable[[Tail], Any], unfrozen_at: int) -> list[torch.Tensor]:
    """Of four steps of three layers; the scale of the first is trained, of the others later."""
    from megatron.core import tensor_parallel

    torch.manual_seed(1)
    layers = torch.nn.ModuleList(Tail(settings(Case())) for _ in range(3))
    found = []
    for step in range(4):
        for number, layer in enumerate(layers):
            layer.scale.requires_grad_(number == 0 or step >= unfrozen_at)
        layers.zero_grad()
        x = y = torch.randn(16, 2, 8, requires_grad=True)
        with RECOMPUTATION.leaving_out([layers]):
            for layer in layers:
                y = tensor_parallel.checkpoint(function_of(layer), False, y)
            y.pow(2).sum().backward()
        found += [one.grad.clone() for one in (x, *layers.parameters()) if one.grad is not None]
    return found


RECOMPUTATION = Recomputation()


def with_other_layers(rank: int, function_of: Any, unfrozen_at: int) -> int:
    """How many results were left out, after a comparison of the bits of all gradients."""
    global RECOMPUTATION
    RECOMPUTATION = Recomputation()
    with layout(Case()):
        own = gradients(function_of, unfrozen_at)
        with patched(RECOMPUTATION):
            ours = gradients(function_of, unfrozen_at)
    assert list(map(torch.equal, own, ours)) == [True] * len(own)
    return RECOMPUTATION.left_out


@pytest.mark.parametrize("function_of", [by_default_argument, by_list, Call])
def test_checkpoints_are_told_apart_by_their_layers(ranks: Any, function_of: Any) -> None:
    assert ranks(1).run(with_other_layers, function_of, 9) == [3 * 2]


def test_a_parameter_that_is_trained_later_is_noticed(ranks: Any) -> None:
    assert ranks(1).run(with_other_layers, by_list, 2) == [1 * 2]
