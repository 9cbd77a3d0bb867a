"""Collectives are counted by kind and group, each once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.collectives import CollectiveCounter, Kind


@pytest.fixture
def counter() -> Iterator[CollectiveCounter]:
    """Installed in this process with a group of one, and taken out again."""
    modules = (dist, dist.distributed_c10d)
    before = [dict(vars(module)) for module in modules]
    counter = CollectiveCounter()
    counter.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counter.active = True
    yield counter
    dist.destroy_process_group()
    for module, names in zip(modules, before, strict=True):
        for name, value in names.items():
            if callable(value):
                setattr(module, name, value)


def test_a_collective_of_objects_counts_once(counter: CollectiveCounter) -> None:
    dist.all_gather_object([None], "object")
    assert sum(counter.counts.values()) == 1
    assert list(counter.counts) == [Kind("world", "all_gather_object")]


def test_groups_have_their_names(counter: CollectiveCounter) -> None:
    group = dist.new_group([0])
    counter.counts.clear()
    counter.know_group("tensor", group)
    counter.know_group("data", group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
    dist.all_gather_into_tensor(torch.empty(2), tensor, group=group)
    dist.broadcast(tensor, 0)
    other = dist.new_group([0])
    dist.all_reduce(tensor, group=other)
    assert counter.counts == {
        Kind("tensor", "all_reduce"): 1,
        Kind("tensor", "all_gather_into_tensor"): 1,
        Kind("world", "broadcast"): 1,
        Kind("other", "all_reduce"): 1,
    }


def test_nothing_counts_outside_of_training(counter: CollectiveCounter) -> None:
    counter.active = False
    dist.all_reduce(torch.ones(1))
    assert not counter.counts


def test_a_failing_collective_does_not_stop_the_count(counter: CollectiveCounter) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        dist.all_reduce("no tensor")
    dist.all_reduce(torch.ones(1))
    assert sum(counter.counts.values()) == 2
