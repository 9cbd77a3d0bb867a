"""State of packages that patch Megatron is found, and trainings keep the bits of its order."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from tests.megatron.models import BATCH, EXPERTS, LENGTH, RECOMPUTED, Case
from tests.megatron.replayed_routing import Routes, counting, routing
from tests.megatron.training import Trainer, in_both_orders

LAYERS = 3
ROUTED = {"moe_token_dispatcher_type": "alltoall", "num_layers": LAYERS}
CASE = Case(experts=2, replicas=2, microbatches=3, options=EXPERTS | RECOMPUTED | ROUTED)


class Replayed(Trainer):
    """Trains with experts that are chosen for each micro-batch and layer."""

    def __init__(self, case: Case, begin: Callable[[float], None]) -> None:
        super().__init__(case)
        self.begin = begin
        self.generator = torch.Generator().manual_seed(torch.distributed.get_rank())

    def forward(self, data: Iterator[torch.Tensor], model: Any) -> Any:
        for routes in Routes.of_layers:
            shape = BATCH * LENGTH, self.case.options["num_moe_experts"]
            routes.begin(torch.rand(shape, generator=self.generator).topk(2).indices)
        self.begin(float(torch.rand((), generator=self.generator)))
        result = super().forward(data, model)
        for routes in Routes.of_layers:
            routes.recomputes = True
        return result


def trained(case: Case, queue: Callable[[], Any]) -> str:
    """Bits after three steps."""
    from megatron.core.transformer.moe.router import TopKRouter

    patched: Any = counting(routing)
    with (
        mock.patch.object(TopKRouter, "routing", patched),
        mock.patch.object(Routes, "of_layers", []),
    ):
        for _ in range(LAYERS):
            Routes(queue)
        return Replayed(case, patched.begin).run(3)


def compare(rank: int, case: Case, queue: Callable[[], Any]) -> tuple[int, int]:
    """Numbers of pairs and of recomputations ahead, after a comparison of all bits."""
    overlapping, _ = in_both_orders(case, lambda: trained(case, queue))
    assert overlapping.overlap is not None
    return overlapping.overlap.runs, overlapping.recomputation.ahead.count


@pytest.mark.parametrize("queue", [list, deque])
def test_replayed_routes_keep_megatrons_bits(ranks: Any, queue: Callable[[], Any]) -> None:
    """State in objects of a class and in a closure, and a queue between forward and backward."""
    steps, pairs = 2, CASE.microbatches - 1
    for runs, ahead in ranks(2).run(compare, CASE, queue):
        assert runs >= steps * pairs
        assert ahead == steps * CASE.microbatches * (LAYERS - 1)
