"""Checkpoints that are recomputed ahead give the gradients of those that are not, bit for bit."""

import functools
import gc
import random
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from commfuse_npu.overlap import ForwardBackwardOverlap, transfers
from commfuse_npu.overlap.transfers import active_turns
from tests.distributed.ranks import on_ranks
from tests.overlap.test_forward_backward import COLUMNS, KINDS, Moved, world

reentrant = partial(checkpoint, use_reentrant=True)


class Linear(torch.autograd.Function):
    """``x @ weight.t()``, whose weight gradient waits while passes take turns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors

        def accumulate(weight: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
            weight.total.add_(grad.t() @ x)

        turns = active_turns()
        if turns is None:
            accumulate(weight, grad, x)
        else:
            turns.weight_gradients.add(weight, accumulate, (grad, x))
        return grad @ weight, None


class Block(torch.nn.Module):
    """Layers with collectives and dropout; also returns a tensor without gradients."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, COLUMNS) for _ in range(2))
        self.kinds = [(draw.choice(KINDS), draw.choice(KINDS)) for _ in range(2)]
        self.nested = draw.random() < 0.3
        self.waiting = draw.random() < 0.5
        self.weight: Any = torch.nn.Parameter(torch.randn(COLUMNS, COLUMNS))
        self.weight.total = torch.zeros(COLUMNS, COLUMNS)

    def forward(self, x: torch.Tensor, scale: Any) -> tuple[torch.Tensor, None, torch.Tensor]:
        for at in range(2):
            x = reentrant(self.layer, at, x) if self.nested and at else self.layer(at, x)
        return x * scale, None, x.detach().sum()

    def layer(self, at: int, x: torch.Tensor) -> torch.Tensor:
        if self.waiting and not torch.is_autocast_enabled("cpu"):
            x = Linear.apply(x, self.weight)
        x = Moved.apply(torch.tanh(self.layers[at](x)), self.kinds[at])
        return torch.nn.functional.dropout(x, 0.2)


class Model(torch.nn.Module):
    """Checkpoints in chains, with layers between them, and a second reader of some outputs."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(draw) for _ in range(draw.randint(1, 5)))
        self.plain = [draw.random() < 0.2 for _ in self.blocks]
        self.second_reader = [draw.random() < 0.2 for _ in self.blocks]
        self.scale = torch.nn.Parameter(torch.ones(COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        also = x.sum() * 0
        for at, block in enumerate(self.blocks):
            scale = self.scale if at % 2 else 1.5
            outputs = block(x, scale) if self.plain[at] else reentrant(block, x, scale)
            x = outputs[0]
            if self.second_reader[at]:
                also = also + x.sin().sum()
        return x.pow(2).mean() + also


def trained(seed: int, enabled: bool, partner: bool, autocast: bool) -> Any:
    """Gradients, losses, random state, and how many recomputations ran ahead."""
    draw = random.Random(seed)
    torch.manual_seed(10 * seed + dist.get_rank())
    model = Model(draw)
    xs = [torch.randn(4, COLUMNS, requires_grad=True) for _ in range(3)]
    overlap = ForwardBackwardOverlap([world()])
    overlap.enabled = enabled
    before = overlap.recompute_ahead.count

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float()

    loss = forward(xs[0])
    losses = [loss.item()]
    for x in xs[1:]:
        if partner:
            loss, _ = overlap.run(partial(forward, x), loss.backward)
        else:
            overlap.run_together(backward=loss.backward)
            loss = forward(x)
        losses.append(loss.item())
    overlap.run_together(backward=loss.backward)
    overlap.check()
    grads = [p.grad for p in [*model.parameters(), *xs] if p.grad is not None]
    grads += [block.weight.total for block in model.blocks]
    return grads, losses, torch.get_rng_state(), overlap.recompute_ahead.count - before


def late(name: str) -> Any:
    """A collective that hands over, whose result is undefined until its ``wait()``."""
    function = getattr(dist, name).__wrapped__

    @functools.wraps(function)
    def collective(out: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return function(out, *args, **kwargs)
        outs = out if isinstance(out, list) else [out]
        arrived = [tensor.detach().clone() for tensor in outs]
        function(arrived if isinstance(out, list) else arrived[0], *args, **kwargs)
        for tensor in outs:
            tensor.detach().fill_(torch.nan)

        def wait() -> None:
            for tensor, result in zip(outs, arrived, strict=True):
                tensor.detach().copy_(result)

        return SimpleNamespace(wait=wait)

    return transfers.handing_over(collective)


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "all_to_all_single"),
)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("partner", [False, True])
@pytest.mark.parametrize("seeds", [16, pytest.param(500, marks=pytest.mark.long)])
@on_ranks(2)
def test_random_models(rank: int, seeds: int, partner: bool, autocast: bool) -> None:
    """Every other model gets the results of its transfers late."""
    ahead = 0
    transfers.hook_collectives()
    changed = {name: late(name) for name in COLLECTIVES}
    for seed in range(seeds):
        plain = trained(seed, False, partner, autocast)
        with mock.patch.multiple(dist, **changed) if seed % 2 else nullcontext():
            ours = trained(seed, True, partner, autocast)
        assert all(map(torch.equal, ours[0], plain[0])), f"seed {seed}"
        assert (len(ours[0]), ours[1]) == (len(plain[0]), plain[1])
        assert torch.equal(ours[2], plain[2]), f"random state after seed {seed}"
        assert plain[3] == 0
        ahead += ours[3]
    assert ahead > 2 * seeds


def chain(layers: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return Moved.apply(torch.tanh(x @ weight), ("all_reduce", "all_reduce"))

    for _ in range(layers):
        x = reentrant(layer, x)
    return x.sum()


@on_ranks(2)
def test_all_but_the_last_of_a_chain_run_ahead_once(rank: int) -> None:
    overlap, weight = ForwardBackwardOverlap([world()]), torch.ones(COLUMNS, COLUMNS)
    ahead = overlap.recompute_ahead
    for again in (False, True):
        loss = chain(5, torch.ones(2, COLUMNS, requires_grad=True), weight)
        before, handed_over = ahead.count, overlap.hand_overs["recomputation"]
        overlap.run_together(backward=partial(loss.backward, retain_graph=again))
        assert ahead.count - before == 4
        assert overlap.hand_overs["recomputation"] - handed_over == 4
        if again:  # in order: the inputs are not kept for a second time
            overlap.run_together(backward=loss.backward)
            assert ahead.count - before == 4
    overlap.enabled = False
    overlap.run_together(
        backward=chain(3, torch.ones(1, COLUMNS, requires_grad=True), weight).backward
    )
    assert ahead.count - before == 4


@on_ranks(2)
def test_inputs_are_freed_as_in_order(rank: int) -> None:
    """Nothing keeps them in an evaluation, nor after the gradients of their checkpoint."""
    overlap, kept = ForwardBackwardOverlap([world()]), list[weakref.ref[torch.Tensor]]()
    weight = torch.ones(COLUMNS, COLUMNS)

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(x))
        y = x @ weight
        dist.all_reduce(y)
        return y.sin()

    with torch.no_grad():
        x = torch.ones(2, COLUMNS)
        for number in range(4):
            x = reentrant(layer, number, x)
    gc.collect()
    assert [reference() for reference in kept[1:]] == [None] * 3
    x = torch.ones(2, COLUMNS, requires_grad=True)
    for number in range(4):
        x = reentrant(layer, number, x)
    loss, alive = x.sum(), []
    inputs = kept[-3:]
    x.register_hook(lambda grad: alive.append(sum(one() is not None for one in inputs)))
    del x
    overlap.run_together(backward=loss.backward)
    assert alive == [3]
    assert sum(one() is not None for one in inputs) == 0, "the graph is still alive"
    assert loss.requires_grad


@on_ranks(2)
def test_hooks_of_saved_tensors_are_left_alone(rank: int) -> None:
    overlap, weight = ForwardBackwardOverlap([world()]), torch.ones(COLUMNS, COLUMNS)
    before = overlap.recompute_ahead.count
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = chain(3, torch.ones(2, COLUMNS, requires_grad=True), weight)
    overlap.run_together(backward=loss.backward)
    assert overlap.recompute_ahead.count == before
    assert "hooks of saved tensors may move their inputs away" in overlap.recompute_ahead.left_alone
