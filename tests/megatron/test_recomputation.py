"""Recomputations run ahead, and leave out the last GEMM and its transfer, with Megatron's bits."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.recomputation import Recomputation, identity
from tests.megatron.models import EXPERTS, RECOMPUTED, Case
from tests.megatron.training import Trainer, layout

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
    return bits, Counter({event.key: event.count for event in profile.key_averages()})


def compare(rank: int, case: Case) -> tuple[Counter[str], int]:
    """The operators that a step leaves out, after a comparison of all bits, and how many
    recomputations ran ahead in the second and third step."""
    overlapping = Overlapping()
    with layout(case):
        own, megatrons = trained(case)
        overlapping.start()
        try:
            with mock.patch.object(ForwardBackwardOverlap, "check"):  # all-reduces of its own
                ours, left = trained(case)
        finally:
            overlapping.stop()
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
    with layout(DENSE):
        overlapping.start()
        try:
            result: torch.Tensor = tensor_parallel.checkpoint(lambda: torch.ones(()), False)
        finally:
            overlapping.stop()
    return result.item()


def test_a_checkpoint_may_get_no_tensor(ranks: Any) -> None:
    assert ranks(2).run(without_tensors) == [1.0, 1.0]


def other_number(rank: int) -> str:
    """The error of a checkpoint that recomputes fewer layers than in its first recomputation."""
    from megatron.core import tensor_parallel

    recomputation = Recomputation()
    overlapping = Overlapping()
    overlapping.recomputation = recomputation
    with layout(DENSE):
        overlapping.start()
        try:
            layers = Trainer(DENSE).models[0].module.decoder.layers
            rows = [layer.mlp.linear_fc2 for layer in layers]
            count = [len(rows)]

            def function(x: torch.Tensor) -> torch.Tensor:
                for row in rows[: count[0]]:
                    x = x + row(x.repeat(2, 1, 1))[0]
                return x

            def train() -> None:
                x = torch.randn(8, 2, 32, requires_grad=True)
                tensor_parallel.checkpoint(function, False, x).sum().backward()

            train()
            train()
            count[0] = 1
            with pytest.raises(RuntimeError) as error:
                train()
        finally:
            overlapping.stop()
    return str(error.value)


def test_another_number_of_layers_is_refused(ranks: Any) -> None:
    for error in ranks(2).run(other_number):
        assert "called 1 row-parallel layers" in error
        assert "the same checkpoint 3" in error


def test_checkpoints_are_told_apart_by_their_layers() -> None:
    def custom(start: int, end: int, mask: torch.Tensor, block: torch.nn.Module) -> Any:
        return lambda x: block(x[start:end] + mask)

    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    mask = torch.zeros(1)
    assert identity(custom(0, 1, mask, one)) == identity(custom(0, 1, mask + 1, one))
    assert identity(custom(0, 1, mask, one)) != identity(custom(1, 2, mask, one))
    assert identity(custom(0, 1, mask, one)) != identity(custom(0, 1, mask, other))
    assert identity(one.forward) == identity(one.forward) != identity(other.forward)


def test_a_new_layer_at_an_old_address_is_another_one() -> None:
    """As when a process frees a model and builds another one."""
    freed = torch.nn.Identity()
    address, of_freed = id(freed), identity(freed.forward)
    del freed
    layers = [torch.nn.Identity() for _ in range(100)]
    reused = [identity(layer.forward) for layer in layers if id(layer) == address]
    assert reused, "no address was used again"
    assert of_freed not in reused
