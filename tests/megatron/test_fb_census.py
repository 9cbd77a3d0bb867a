"""State that forward and backward both write is found, or is kept apart for each side."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap.side_states import Census, side_states
from tests.distributed.ranks import on_ranks
from tests.overlap.test_pair import world

LENGTHS = "mindspeed_llm.lengths_of_a_test"


class Layer(torch.nn.Module):
    """Keeps state of a micro-batch, as a dispatcher of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.calls = 0


@on_ranks(2)
def test_what_both_sides_write_is_found(rank: int) -> None:
    module: Any = ModuleType(LENGTHS)
    module.lengths, module.of_forwards, module.table = None, None, [0]
    sys.modules[LENGTHS] = module
    layer = Layer()

    def forward() -> None:
        module.lengths, module.of_forwards = [1, 2], "forward"
        dist.all_reduce(torch.ones(1))
        layer.kept = torch.ones(1)
        module.table.append(1)

    def backward() -> None:
        module.lengths = [3, 4]
        layer.kept = torch.zeros(1)
        dist.all_reduce(torch.ones(1))
        module.table.append(2)

    try:
        # Both chunks of a virtual pipeline have a layer of this name.
        models = [torch.nn.Sequential(layer), torch.nn.Sequential(Layer())]
        census = Census(ForwardBackwardOverlap([world()]), models)
        census.run(forward, backward, None)
    finally:
        del sys.modules[LENGTHS]
    expected = ["chunk 0, 0: Layer.kept", f"{LENGTHS}.lengths", f"{LENGTHS}.table"]
    assert census.unknown == expected


class Held:
    """State of a micro-batch that a dispatcher of experts keeps."""

    def __init__(self, **parts: Held) -> None:
        self.counts: Any = None
        vars(self).update(parts)


Held.__module__ = LENGTHS


@on_ranks(2)
def test_what_experts_and_attention_keep_is_of_one_side(rank: int) -> None:
    """Dispatcher, its ``disaptor``, mask and checkpoint are kept per side, other parts are not."""
    checkpoint = type("CheckpointWithoutOutput", (), {})
    layer = Layer()
    held: Any = Held(disaptor=Held(), part=Held())
    layer.token_dispatcher, layer.router, layer.attention_mask = held, Held(), None
    model = torch.nn.Sequential(layer)

    def side() -> None:
        for owner in (held, held.disaptor, held.part, layer.router):
            owner.counts = torch.ones(1)
        layer.attention_mask, layer.kept = torch.ones(1), checkpoint()
        dist.all_reduce(torch.ones(1))

    overlap = ForwardBackwardOverlap([world()])
    census = Census(overlap, [model])
    census.run(side, side, None)
    owner, seen = "chunk 0, 0: Layer", []
    expected = [f"{owner}.router.counts", f"{owner}.token_dispatcher.part.counts"]
    assert census.unknown == expected
    overlap.states = side_states([model], "cpu")

    def alone(value: int) -> None:
        held.counts = held.disaptor.counts = layer.attention_mask = layer.kept = value
        dist.all_reduce(torch.ones(1))
        seen.append((held.counts, held.disaptor.counts, layer.attention_mask, layer.kept))

    overlap.run(partial(alone, 1), partial(alone, 2))
    assert sorted(seen) == [(1,) * 4, (2,) * 4]
