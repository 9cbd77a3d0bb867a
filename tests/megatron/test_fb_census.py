"""State that forward and backward both write is found, or is kept apart for each side."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from mindspeed_patches.fb_overlap.side_states import Census, side_states
from tests.distributed.ranks import on_ranks
from tests.overlap.test_pair import world

LENGTHS = "mindspeed_llm.lengths_of_a_test"


class Held:
    """State of a micro-batch that a part of a layer keeps."""

    def __init__(self, **parts: Held) -> None:
        self.counts: Any = None
        vars(self).update(parts)


Held.__module__ = LENGTHS


@on_ranks(2)
def test_what_both_sides_write_is_found_unless_each_side_has_its_own(rank: int) -> None:
    """Dispatcher, its ``disaptor``, mask and checkpoint are kept per side, other parts are not."""
    module: Any = ModuleType(LENGTHS)
    module.lengths, module.of_forwards, module.table = None, None, [0]
    layer: Any = torch.nn.Identity()
    held: Any = Held(disaptor=Held(), part=Held())
    layer.token_dispatcher, layer.router, layer.attention_mask = held, Held(), None
    layer.kept, layer.recomputed, layer.calls = None, None, 0

    def side(forward: bool) -> None:
        module.lengths = [1, 2] if forward else [3, 4]
        if forward:
            module.of_forwards = "forward"
        for owner in (held, held.disaptor, held.part, layer.router):
            owner.counts = torch.ones(1)
        layer.attention_mask, layer.kept = torch.ones(1), torch.ones(1)
        layer.recomputed = type("CheckpointWithoutOutput", (), {})()
        dist.all_reduce(torch.ones(1))
        module.table.append(1)

    # Both chunks of a virtual pipeline have a layer of this name.
    models = [torch.nn.Sequential(layer), torch.nn.Sequential(torch.nn.Identity())]
    overlap = ForwardBackwardOverlap([world()])
    with mock.patch.dict(sys.modules, {LENGTHS: module}):
        census = Census(overlap, models)
        census.run(partial(side, True), partial(side, False), None)
    owner = "chunk 0, 0: Identity"
    parts = ("kept", "router.counts", "token_dispatcher.part.counts")
    expected = [f"{owner}.{part}" for part in parts] + [f"{LENGTHS}.lengths", f"{LENGTHS}.table"]
    assert census.unknown == expected

    seen = []
    overlap.states = side_states(models, "cpu")

    def alone(value: int) -> None:
        held.counts = held.disaptor.counts = layer.attention_mask = layer.recomputed = value
        dist.all_reduce(torch.ones(1))
        seen.append((held.counts, held.disaptor.counts, layer.attention_mask, layer.recomputed))

    overlap.run(partial(alone, 1), partial(alone, 2))
    assert sorted(seen) == [(1,) * 4, (2,) * 4]
