"""Collectives are counted by kind and group, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.observe import CollectiveCounter


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectiveCounter]:
    """Installed in this process with a group of one, and taken out again."""
    for module in (dist, dist.distributed_c10d):
        for name, value in vars(module).items():
            if callable(value):  # put back at the end
                monkeypatch.setattr(module, name, value)
    counter = CollectiveCounter()
    counter.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counter.active = True
    yield counter
    dist.destroy_process_group()


def test_groups_have_their_names_and_objects_count_once(counter: CollectiveCounter) -> None:
    tensor = torch.ones(2)
    counter.active = False
    dist.all_reduce(tensor)
    group = dist.new_group([0], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    counter.active = True
    dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
    dist.all_gather_into_tensor(torch.empty(2), tensor, group=group)
    dist.broadcast(tensor, 0)
    dist.all_gather_object([None], "object")
    assert counter.counts == {
        "tensor model parallel: all_reduce": 1,
        "tensor model parallel: all_gather_into_tensor": 1,
        "default pg: broadcast": 1,
        "default pg: all_gather_object": 1,
    }


def test_a_failing_collective_does_not_stop_the_count(counter: CollectiveCounter) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        dist.all_reduce("no tensor")
    dist.all_reduce(torch.ones(1))
    assert sum(counter.counts.values()) == 2
