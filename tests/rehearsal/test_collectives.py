"""A collective is counted where the model issued it, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_patches.rehearsal.collectives import CollectiveCounter, Site


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


def _reduce(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


class _ReduceBoth(torch.autograd.Function):
    """A collective in either direction, as in a row-parallel layer with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _reduce(grad.clone())


class _ReduceBackward(torch.autograd.Function):
    """A collective in the backward only, as in a column-parallel layer without it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        dist.all_reduce(grad_input := grad * weight)
        return grad_input, (grad * x).sum().reshape(1)


class RowParallelLinear(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _ReduceBoth.apply(x)
        return result


class ColumnParallelLinear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _ReduceBackward.apply(x, self.weight)
        return result


class Embedding(torch.nn.Module):
    """Not a linear layer; it uses the same function as one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _ReduceBoth.apply(x)
        return result


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.linear_qkv = ColumnParallelLinear()
        self.linear_proj = RowParallelLinear()

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        x = self.embedding(x)
        if recompute:
            result: torch.Tensor = checkpoint(self.layers, x, use_reentrant=True)
            return result
        return self.layers(x)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear_proj(self.linear_qkv(x))
        return hidden


def step(counter: CollectiveCounter, recompute: bool = False) -> dict[tuple[str, str], int]:
    model = Model()
    counter.know_model([model])
    model(torch.ones(3, requires_grad=True), recompute).sum().backward()
    return {(site.layer, site.where): count for site, count in counter.counts.items()}


def test_each_collective_finds_its_layer(counter: CollectiveCounter) -> None:
    assert step(counter) == {
        ("", f"{__name__}: _reduce"): 2,
        ("linear_proj", "RowParallelLinear.forward"): 1,
        ("linear_proj", "RowParallelLinear.backward"): 1,
        ("linear_qkv", "ColumnParallelLinear.backward"): 1,
    }


def test_recomputed_forwards_are_forwards(counter: CollectiveCounter) -> None:
    counts = step(counter, recompute=True)
    assert counts["linear_proj", "RowParallelLinear.forward"] == 2
    assert counts["linear_proj", "RowParallelLinear.backward"] == 1
    assert counts["linear_qkv", "ColumnParallelLinear.backward"] == 1


def test_a_collective_of_objects_counts_once(counter: CollectiveCounter) -> None:
    dist.all_gather_object([None], "object")
    assert sum(counter.counts.values()) == 1
    (site,) = counter.counts
    assert site.operation == "all_gather_object"


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
    where = f"{__name__}: {test_groups_have_their_names.__name__}"
    assert counter.counts == {
        Site("", where, "all_reduce", "tensor"): 1,
        Site("", where, "all_gather_into_tensor", "tensor"): 1,
        Site("", where, "broadcast", "world"): 1,
        Site("", where, "all_reduce", "other"): 1,
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
