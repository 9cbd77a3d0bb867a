"""A forward and a backward that take turns equal a sequential run bit for bit."""

import random
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from commfuse_npu.overlap import (
    Attributes,
    ForwardBackwardOverlap,
    OtherSideError,
    transfers,
)
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD, FORWARD
from tests.distributed.ranks import on_ranks

COLUMNS = 6


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Moved(torch.autograd.Function):
    """A shape-preserving collective in the forward, and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kinds: tuple[str, str]) -> torch.Tensor:
        ctx.kinds = kinds
        return moved(kinds[0], x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return moved(ctx.kinds[1], grad), None


def moved(kind: str, x: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    x = x.contiguous().clone()
    if kind == "all_reduce":
        dist.all_reduce(x)
        return x / size
    if kind == "gather and scatter":
        full, back = x.new_empty(size * x.shape[0], *x.shape[1:]), torch.empty_like(x)
        dist.all_gather_into_tensor(full, x)
        work = dist.reduce_scatter_tensor(back, full, async_op=True)
        full.sin()  # overlaps with the transfer
        work.wait()
        return back / size
    if kind == "all_to_all":
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out
    if kind == "list":
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x, group=world())
        return parts[(dist.get_rank() + 1) % size]
    return x


KINDS = ("all_reduce", "gather and scatter", "all_to_all", "list", "nothing")


checkpoint = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


class Model(torch.nn.Module):
    """Random layers with collectives, dropout and recomputation."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count = draw.randint(1, 5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, COLUMNS) for _ in range(count))
        self.kinds = [(draw.choice(KINDS), draw.choice(KINDS)) for _ in range(count)]
        self.recompute = [draw.random() < 0.4 for _ in range(count)]
        self.dropout = draw.choice((0.0, 0.2))
        self.seen = 0

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        self.seen = number  # state of a micro-batch; a recomputation sets it again
        for at, recompute in enumerate(self.recompute):
            x = checkpoint(self._layer, at, x, number) if recompute else self._layer(at, x, number)
        return x.pow(2).mean()

    def _layer(self, at: int, x: torch.Tensor, number: int) -> torch.Tensor:
        if self.recompute[at]:
            self.seen = number
        x = Moved.apply(torch.tanh(self.layers[at](x)) * (1 + self.seen), self.kinds[at])
        return torch.nn.functional.dropout(x, self.dropout)


def trained(seed: int, enabled: bool, orders: bool) -> Any:
    """Train a random model; returns gradients, losses, random state and the number of pairs."""
    draw = random.Random(seed)
    torch.manual_seed(10 * seed + dist.get_rank())
    model = Model(draw)
    count = draw.randint(2, 4)
    xs = [torch.randn(draw.choice((2, 4, 6)) * 2, COLUMNS) for _ in range(count)]
    overlap = ForwardBackwardOverlap([world()])
    overlap.states.append(Attributes(model, "seen"))
    overlap.enabled = enabled
    if orders:  # some of them too short
        lists = [tuple(draw.random() < 0.5 for _ in range(draw.randint(0, 12))) for _ in (0, 1)]
        overlap.orders[None] = lists[0], lists[1]
    loss = model(xs[0], 0)
    losses = [loss.item()]
    for number in range(1, count):
        loss, _ = overlap.run(lambda n=number: model(xs[n], n), loss.backward)
        losses.append(loss.item())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return grads, losses, torch.get_rng_state(), overlap.pairs


@pytest.mark.parametrize("orders", [False, True])
@pytest.mark.parametrize("seeds", [25, pytest.param(1000, marks=pytest.mark.long)])
@on_ranks(2)
def test_random_models(rank: int, seeds: int, orders: bool) -> None:
    """Compare strict turns or random orders with a sequential run."""
    pairs = 0
    for seed in range(seeds):
        ours, plain = trained(seed, True, orders), trained(seed, False, False)
        same = all(map(torch.equal, ours[0], plain[0])) and ours[1] == plain[1]
        assert same, f"seed {seed}"
        assert torch.equal(ours[2], plain[2]), f"random state after seed {seed}"
        pairs += ours[3]
    assert pairs > seeds


@on_ranks(2)
def test_sides_take_turns_at_blocking_transfers_of_named_groups(rank: int) -> None:
    """Each side records the pieces that it runs between transfers."""
    other = dist.new_group(list(range(dist.get_world_size())))
    overlap = ForwardBackwardOverlap([world()])
    noted: list[str] = []

    def side(name: str, transfers: int) -> str:
        for number in range(transfers):
            noted.append(f"{name}{number}")
            dist.all_reduce(torch.ones(2))
        noted.append(f"{name} end")
        return name

    assert overlap.run(lambda: side("f", 2), lambda: side("b", 3)) == ("f", "b")
    assert overlap.hand_overs == [2, 2]
    assert noted == ["f0", "b0", "f1", "b1", "f end", "b2", "b end"]
    noted.clear()
    overlap.orders["chosen"] = (False,), (False, True)  # then as by default
    overlap.run(lambda: side("f", 2), lambda: side("b", 3), "chosen")
    assert noted == ["f0", "f1", "b0", "b1", "f end", "b2", "b end"]
    noted.clear()

    def elsewhere() -> None:
        dist.all_reduce(torch.ones(2), group=other)
        dist.all_reduce(torch.ones(2), async_op=True, group=world())
        full = torch.empty(dist.get_world_size())
        dist.all_gather_into_tensor(full, torch.ones(1), async_op=True).wait()
        noted.append("not handed over")
        dist.all_reduce(torch.ones(2), dist.ReduceOp.SUM, world(), True).wait()
        noted.append("handed over")

    overlap.run(elsewhere, lambda: side("b", 0))
    assert noted == ["not handed over", "b end", "handed over"]


@on_ranks(2)
def test_host_waits_are_places_to_hand_over(rank: int) -> None:
    order: list[str] = []

    class Event:
        synchronize = transfers._host_wait(lambda self: order.append("the host has waited"))

    class Stream:
        record_event = Event
        synchronize = transfers._stream_synchronize(lambda self: None)

    overlap = ForwardBackwardOverlap([world()])
    overlap.run(
        lambda: [Stream().synchronize(), Event().synchronize()],
        lambda: [order.append("backward"), Event().synchronize()],
    )
    assert overlap.hand_overs == [2, 1]
    assert order == ["backward", *["the host has waited"] * 3]


def fail() -> None:
    raise KeyError("the transfer")


@pytest.mark.parametrize("in_wait", [False, True])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("side", [FORWARD, BACKWARD])
@on_ranks(2)
def test_an_error_ends_both_sides_with_its_own_name(
    rank: int, side: int, at: int, in_wait: bool
) -> None:
    """The named side raises at its piece ``at``, or in the transfer after it."""
    overlap, ended = ForwardBackwardOverlap([world()]), list[int]()
    # Its wait fails, as if another rank had died.
    work = SimpleNamespace(wait=fail)
    all_reduce = transfers.handing_over(lambda x, group=None, async_op=False: work, True)

    def run(me: int) -> None:
        try:
            for piece in range(4):
                if (me, piece) == (side, at):
                    all_reduce(torch.ones(2)) if in_wait else fail()
                dist.all_reduce(torch.ones(2))
        except OtherSideError:
            ended.append(me)
            raise

    with pytest.raises(KeyError, match="the transfer"):
        overlap.run(lambda: run(FORWARD), lambda: run(BACKWARD))
    assert active_turns() is None
    assert overlap.run(lambda: 1, lambda: 2) == (1, 2)
    # Not seen by a backward that had not begun, or by a forward that had ended.
    unseen = (FORWARD, 0, False), (BACKWARD, 3, True)
    assert ended == ([] if (side, at, in_wait) in unseen else [1 - side])


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    overlap = ForwardBackwardOverlap([world()])
    x, batch = torch.ones(2, requires_grad=True), torch.ones(1, 2)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    sharded = fully_shard(torch.nn.Linear(2, 2))
    backward = "a backward inside the forward of a pair"
    for words, forward in (
        ("a pair cannot contain another one", lambda: overlap.run(lambda: 1, lambda: 2)),
        (backward, lambda: x.sum().backward()),
        (backward, lambda: torch.autograd.grad(x.sum(), x)),
        (r"outside of no_sync\(\) in a pair", lambda: model(batch)),
        ("a fully sharded module in a pair", lambda: sharded(batch)),
    ):
        with pytest.raises(RuntimeError, match=words):
            overlap.run(forward, lambda: None)
    with model.no_sync():
        overlap.run(lambda: model(batch), lambda: None)
    with pytest.raises(ValueError, match="no group given"):
        ForwardBackwardOverlap([])


@pytest.mark.parametrize("orders", [False, True])
@on_ranks(2)
def test_ranks_that_hand_over_or_have_orders_that_differ_are_told(rank: int, orders: bool) -> None:
    overlap = ForwardBackwardOverlap([world()])
    overlap.run(lambda: dist.all_reduce(torch.ones(1)), lambda: None)
    overlap.check()
    if orders:
        overlap.orders[None] = ((rank == 0,), ())
    else:  # explicit turns: each rank hands over as often as its number
        overlap.run(lambda: [active_turns().hand_over() for _ in range(rank)], lambda: None)
    words = rf"handed over \[\d, 0\] times in {2 - orders} pairs, other ranks .* matched wrongly"
    with pytest.raises(RuntimeError, match=words):
        overlap.check()


@on_ranks(2)
def test_the_second_thread_has_the_callers_context(rank: int) -> None:
    overlap = ForwardBackwardOverlap([world()])

    def state() -> Any:
        modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.is_grad_enabled(), modes

    plain = state()
    flops = FlopCounterMode(display=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("cpu"), flops:
        changed = state()
        assert overlap.run(state, state) == (changed, changed)
    assert changed == (torch.bfloat16, False, (1, 1))
    assert overlap.run(state, state) == (plain, plain)
    threads = {overlap.run(threading.get_ident, threading.get_ident)[1] for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


@on_ranks(2)
def test_each_side_finds_its_state_as_it_left_it(rank: int) -> None:
    """A list that is referenced elsewhere is emptied and refilled in place."""
    owner = SimpleNamespace(value=0, items=[])
    items = owner.items
    overlap = ForwardBackwardOverlap([world()], states=[Attributes(owner, "value", "items")])
    observed: list[tuple[int, list[int]]] = []

    def side(values: list[int]) -> None:
        for value in values:
            owner.value = value
            items.append(value)
            dist.all_reduce(torch.ones(2))
            observed.append((owner.value, list(items)))
            items.clear()

    overlap.run(lambda: side([10, 11]), lambda: side([20, 21, 22]))
    assert sorted(observed) == [(value, [value]) for value in (10, 11, 20, 21, 22)]
    assert owner.items is items
    assert owner.value == 11


@on_ranks(2)
def test_the_environment_turns_it_off(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMFUSE_FB_OVERLAP", "0")
        overlap = ForwardBackwardOverlap([world()])
    order: list[str] = []
    overlap.run(lambda: order.append("forward"), lambda: order.append("backward"))
    assert (overlap.pairs, order) == (0, ["backward", "forward"])
