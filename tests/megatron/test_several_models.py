"""Two models and a reference in one process: each keeps the bits of Megatron's own order."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from tests.megatron.models import EXPERTS, RECOMPUTED, Case
from tests.megatron.training import Trainer, in_both_orders, layout, started

LAYERS = 3
MICROBATCHES = 2, 1, 3
"""Of each step."""
LENGTHS = 8, 6, 16, 4, 12, 10
"""Tokens of one micro-batch after the other: in the second step more than in the first."""
DROPOUT = {"num_layers": LAYERS, "hidden_dropout": 0.1}
DENSE = Case(tensor=2, lengths=LENGTHS, options=RECOMPUTED | DROPOUT)
SPARSE = DENSE.but(EXPERTS)


class Counted:
    """How often norms ran, forwards and backwards."""

    def __init__(self) -> None:
        self.norms = 0

    def scale(self, norm: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """A forward hook whose result depends on the order of passes."""
        self.norms += 1
        if output.requires_grad:
            output.register_hook(self.count)
        return output * (1 + self.norms / 1024)

    def count(self, gradient: torch.Tensor) -> None:
        self.norms += 1


def trained(in_order: bool) -> list[str]:
    """Bits of an actor and of a critic, with evaluations and a reference between their steps.

    Args:
        in_order: of the actor, no two passes can be swapped.
    """
    reference, actor, critic = Trainer(DENSE), Trainer(DENSE), Trainer(SPARSE)
    counted = Counted()
    for layer in actor.models[0].module.decoder.layers if in_order else ():
        layer.counted = counted
        layer.input_layernorm.register_forward_hook(counted.scale)
    bits = []
    for number, microbatches in enumerate(MICROBATCHES):
        for model in (reference, actor, critic):
            model.case = replace(model.case, microbatches=microbatches)
        with torch.no_grad():
            reference.accumulate(forward_only=True)
        if number % 2:
            critic.accumulate(forward_only=True)
        bits += [actor.run(1), critic.run(1)]
    return [*bits, str(reference.losses)]


def compare(rank: int, in_order: bool) -> SimpleNamespace:
    """Numbers of pairs and of recomputations ahead, after a comparison of all bits."""
    overlapping, _ = in_both_orders(DENSE, lambda: trained(in_order))
    assert overlapping.overlap is not None
    return SimpleNamespace(
        pairs=overlapping.overlap.hand_overs["forward"], ahead=overlapping.recomputation.ahead.count
    )


@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_model_has_its_own_decision(ranks: Any, in_order: bool) -> None:
    """Numbers and lengths of micro-batches change; the actor comes first."""
    backwards = sum(MICROBATCHES[1:])
    models = 1 if in_order else 2
    for counts in ranks(2).run(compare, in_order):
        assert (counts.pairs == 0) is in_order
        assert counts.ahead == models * backwards * (LAYERS - 1)


class Chunked(Trainer):
    """Computes the loss in chunks, with an all-reduce for each; their number depends on the data.

    The first micro-batches of both replicas have the same number.
    """

    def forward(self, data: Any, model: Any) -> Any:
        from megatron.core import parallel_state

        output, loss = super().forward(data, model)
        chunks = 1 + len(self.losses) * parallel_state.get_data_parallel_rank()

        def chunked(output: torch.Tensor) -> Any:
            rows = output.float().mean(0, keepdim=True).expand(chunks, -1) / chunks
            for row in rows.detach().unbind():
                torch.distributed.all_reduce(
                    row.clone(), group=parallel_state.get_tensor_model_parallel_group()
                )
            return rows.sum(), loss(output)[1]

        return output, chunked


def with_chunks(rank: int) -> int:
    """The number of pairs, after a comparison of all bits."""
    case = replace(DENSE, replicas=2, microbatches=3)
    overlapping, _ = in_both_orders(case, lambda: Chunked(case).run(2))
    assert overlapping.overlap is not None
    return overlapping.overlap.hand_overs["forward"]


def test_replicas_may_have_other_numbers_of_chunks(ranks: Any) -> None:
    """As verl's entropy in chunks, where lengths differ: no collective joins the replicas."""
    assert all(ranks(4).run(with_chunks))


def decided(rank: int) -> str:
    """What is printed if overlapped steps take 3 s for 4 micro-batches, others 2 s for 2."""
    case = DENSE.but({"num_layers": 1})
    numbers = [2, 2, *[2, 4] * 3, 2]
    overlapping, printed = Overlapping(), io.StringIO()
    clock = [0.0]
    for number in numbers[1:-1]:
        clock += [clock[-1], clock[-1] + (2.0 if number == 2 else 3.0)]
    overlapping.clock = iter(clock[1:]).__next__
    with layout(case), redirect_stdout(printed), started(overlapping):
        trainer = Trainer(case)
        for number in numbers:
            trainer.case = replace(case, microbatches=number)
            trainer.run(1)
    return printed.getvalue()


def test_steps_are_timed_per_microbatch(ranks: Any) -> None:
    printed, _ = ranks(2).run(decided)
    assert "takes 3000.0 ms, 4000.0 ms in Megatron's order" in printed
    assert "off: " not in printed
