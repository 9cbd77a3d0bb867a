"""State that passes write is found; each pass has its own, or what cannot be is named."""

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
from mindspeed_patches.fb_overlap.pass_states import Census, pass_states
from tests.distributed.ranks import on_ranks
from tests.overlap.test_forward_backward import world

PATCHES = [sum, min, max]
LENGTHS, USERS = "mindspeed_llm.lengths_of_a_test", "package_of_a_user"


class Held:
    """State of a micro-batch that a part of a layer keeps."""

    kept: Any = None

    def __init__(self, **parts: Held) -> None:
        self.counts: Any = None
        vars(self).update(parts)


Held.__module__ = LENGTHS


class UsersLayer(torch.nn.Identity):
    __module__ = USERS


def state() -> tuple[Any, Any, Any]:
    """Modules of MindSpeed-LLM and of a user, and a layer of the user's class."""
    module: Any = ModuleType(LENGTHS)
    module.lengths, module.of_forwards, module.table, module.Held = None, None, [0], Held
    module.patched = sum
    users: Any = ModuleType(USERS)
    users.scale = None
    layer: Any = UsersLayer()
    layer.token_dispatcher, layer.router = Held(disaptor=Held(), part=Held()), Held()
    layer.attention_mask = layer.kept = layer.recomputed = None
    layer.register_buffer("buffer", torch.zeros(()))
    layer.sums = torch.zeros(())
    return module, users, layer


@on_ranks(2)
def test_what_passes_write_is_found(rank: int) -> None:
    """Dispatcher, its ``disaptor``, mask and checkpoint are known to belong to a micro-batch."""
    module, users, layer = state()
    held = layer.token_dispatcher

    def side(forward: bool) -> None:
        module.lengths = [1, 2] if forward else [3, 4]
        module.patched = min if forward else max
        users.scale = Held.kept = 1.0 if forward else 2.0
        if forward:
            module.of_forwards = "forward"
            layer.sums += 1
        for owner in (held, held.disaptor, held.part, layer.router):
            owner.counts = torch.ones(1)
        layer.attention_mask, layer.kept = torch.ones(1), torch.ones(1)
        layer.recomputed = type("CheckpointWithoutOutput", (), {})()
        dist.all_reduce(torch.ones(1))
        layer.buffer.fill_(1.0)
        module.table.append(1)

    # Both chunks of a virtual pipeline have a layer of this name.
    models = [torch.nn.Sequential(layer), torch.nn.Sequential(torch.nn.Identity())]
    overlap = ForwardBackwardOverlap([world()])
    with mock.patch.dict(sys.modules, {LENGTHS: module, USERS: users}):
        census = Census(models, [])
        for kind in ("forward", "backward"):
            census.begin()
            overlap.at_point = lambda _, kind=kind: census.look(kind)
            overlap.run_together(**{kind: partial(side, kind == "forward")})
            census.look(kind, force=True)
    owner = "chunk 0, 0: UsersLayer"
    parts = ("_buffers", "kept", "router.counts", "token_dispatcher.part.counts")
    assert census.written_by_both(["forward"], ["backward"]) == [
        *(f"{owner}.{part}" for part in parts),
        *(f"{LENGTHS}.{name}" for name in ("Held.kept", "lengths", "table")),
        f"{USERS}.scale",
    ]

    overlap = ForwardBackwardOverlap([world()], [*pass_states(models, "cpu"), *census.states()])
    seen = []

    def alone(value: int) -> None:
        held.counts = held.disaptor.counts = layer.attention_mask = layer.recomputed = value
        module.of_forwards = users.scale = Held.kept = value
        module.table[0] = value
        module.patched = PATCHES[value]
        layer.sums += 1
        dist.all_reduce(torch.ones(1))
        seen.append((
            *(held.counts, held.disaptor.counts, layer.attention_mask, layer.recomputed),
            *(module.of_forwards, users.scale, Held.kept, module.table[0]),
            PATCHES.index(module.patched),
        ))  # fmt: skip

    overlap.run(partial(alone, 1), partial(alone, 2))
    assert sorted(seen) == [(1,) * 9, (2,) * 9]
    assert layer.sums == 3, "tensors that are changed in place are shared: sums"
