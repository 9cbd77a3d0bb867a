"""Weights of sharded layers are prefetched, and never used if they have changed since."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from commfuse_npu.ops.sharded_gradients import average_gradients
from commfuse_npu.ops.sharded_module import shard_linears
from commfuse_npu.plan.instructions import Post
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import view, watch_posts
from tests.distributed.ranks import on_ranks
from tests.distributed.test_sharded_module import chain, transport


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(3)
def test_the_next_layer_is_sent_for_before_it_is_called(rank: int, batched: bool) -> None:
    """Events once the order is known: starts of layers, and weight sends as (rows, step)."""
    model = chain(transport(batched))
    events: list[Any] = []
    for place, layer in enumerate(model):
        for hook in (layer.register_forward_pre_hook, layer.register_full_backward_pre_hook):
            hook(lambda *_, place=place: events.append(f"layer {place}"))

    def sent(running: Running, one: Post) -> None:
        if one.send is not None and one.send.span.buffer == "shard":
            events.append((view(running, one.send.span).shape[0], one.send.transfer.step))

    for _ in range(2):
        events.clear()
        with pytest.MonkeyPatch.context() as patch:
            watch_posts(patch, sent)
            y = model(torch.ones(3, 16, requires_grad=True))
            assert not model[0].prefetch.under_way
            forward = list(events)
            events.clear()
            y.sum().backward()
            assert not model[0].prefetch.under_way
        average_gradients(model, transport(batched))
    assert forward == [
        *("layer 0", (1, 0), (1, 1), (2, 0)),
        *("layer 1", (2, 1), (3, 0)),
        *("layer 2", (3, 1)),
    ]
    assert events == [
        *("layer 2", (3, 0), (3, 1), (2, 0)),
        *("layer 1", (2, 1), (1, 0)),
        *("layer 0", (1, 1)),
    ]


def alike(
    models: list[nn.Module],
    call: Callable[[nn.Module], torch.Tensor],
    why: object,
    grad: bool = True,
) -> None:
    """Assert that all models give the same outputs and gradients, bit for bit."""
    results = []
    for model in models:
        model.zero_grad()
        y = call(model)
        if grad:
            y.sum().backward()
            average_gradients(model, transport())
        results.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results)), why


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "nothing": lambda weight: None,
    "in place": lambda weight: weight.add_(1),
    "replaced": lambda weight: setattr(weight, "data", weight.data * 2),
}


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_a_weight_that_changes_is_never_used_stale(rank: int) -> None:
    """A hook between two layers changes or replaces the weight while the old one is prefetched."""
    models = [chain(transport(), prefetch) for prefetch in (True, False)]
    for how in ("nothing", "nothing", "in place", "nothing", "replaced", "in place"):

        def call(model: nn.Module, how: str = how) -> torch.Tensor:
            def between(*_: Any) -> None:
                if model is models[0] and how != "nothing":
                    assert model[0].prefetch.under_way
                with torch.no_grad():
                    CHANGES[how](model[1].weight)

            hook = model[0].register_forward_hook(between)
            y = model(torch.ones(3, 16))
            hook.remove()
            return y

        alike(models, call, how)


@on_ranks(2)
def test_a_weight_that_changes_under_autocast_is_not_used_by_the_backward(rank: int) -> None:
    """The weight changes after the forward; the backward uses the copy that the forward had."""
    models = [chain(transport(), prefetch) for prefetch in (True, False)]
    under_way: list[bool] = []
    models[0][1].register_full_backward_pre_hook(
        lambda *_: under_way.append(models[0][0].prefetch.under_way)
    )
    for step in range(4):

        def call(model: nn.Module, step: int = step) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.ones(3, 16, requires_grad=True))
            with torch.no_grad():
                model[1].weight.add_(step // 2)
            return y

        alike(models, call, step)
    # A changed weight does not change the expected order of layers.
    assert under_way == [False, True, True, True]


class AnyOrder(nn.Sequential):
    """Calls its layers in the order that it is told."""

    order = "0123"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in self.order:
            x = self[int(place)](x)
        return x


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_orders_that_differ(rank: int) -> None:
    """Layers skipped, exchanged or used twice; forwards that end early or need no gradient."""
    link, models = transport(), []
    for prefetch in (True, False):
        torch.manual_seed(5)
        layers = AnyOrder(*(nn.Linear(24, 24) for _ in range(4)))
        models.append(shard_linears(layers, transport=link, prefetch=prefetch))
    orders = "0123", "0123", "01", "0123", "3210", "0123", "0011", "0101", "0123", "2", "1"
    for order, grad in product(orders, (True, False, True)):

        def call(model: nn.Module, order: str = order, grad: bool = grad) -> torch.Tensor:
            model.order = order
            with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=order == "3210"):
                return model(torch.ones(3, 24))

        alike(models, call, order, grad)
        assert not models[0][0].prefetch.under_way
    assert not link._in_flight
