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

from commfuse_npu.overlap import Attributes, ForwardBackwardOverlap, OtherPassError, transfers
from commfuse_npu.overlap.thread_context import saved_tensors_hooks
from commfuse_npu.overlap.transfers import active_turns
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


def trained(seed: int, enabled: bool) -> Any:
    """Train a random model; returns gradients, losses, random state and the number of runs."""
    draw = random.Random(seed)
    torch.manual_seed(10 * seed + dist.get_rank())
    model = Model(draw)
    count = draw.randint(2, 4)
    xs = [torch.randn(draw.choice((2, 4, 6)) * 2, COLUMNS) for _ in range(count)]
    overlap = ForwardBackwardOverlap([world()])
    overlap.states.append(Attributes(model, "seen"))
    overlap.enabled = enabled
    loss = model(xs[0], 0)
    losses = [loss.item()]
    for number in range(1, count):
        loss, _ = overlap.run(lambda n=number: model(xs[n], n), loss.backward)
        losses.append(loss.item())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return grads, losses, torch.get_rng_state(), overlap.runs


@pytest.mark.parametrize("seeds", [25, pytest.param(1000, marks=pytest.mark.long)])
@on_ranks(2)
def test_random_models(rank: int, seeds: int) -> None:
    """Compare passes that take turns with a sequential run."""
    runs = 0
    for seed in range(seeds):
        ours, plain = trained(seed, True), trained(seed, False)
        same = all(map(torch.equal, ours[0], plain[0])) and ours[1] == plain[1]
        assert same, f"seed {seed}"
        assert torch.equal(ours[2], plain[2]), f"random state after seed {seed}"
        runs += ours[3]
    assert runs > seeds


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
    assert overlap.hand_overs == {"forward": 2, "backward": 2}
    assert noted == ["f0", "b0", "f1", "b1", "f end", "b2", "b end"]
    noted.clear()
    three = {name: partial(side, name, 2) for name in "abc"}
    assert overlap.run_together(**three) == ("a", "b", "c")
    in_turns = [f"{name}{end}" for end in ("0", "1", " end") for name in "abc"]
    assert noted == in_turns
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
def test_waits_of_the_host_in_named_modules_hand_over(rank: int) -> None:
    order: list[str] = []

    class Event:
        synchronize = transfers._event_synchronize(lambda self: order.append("waited"))

    class Stream:
        record_event = Event
        synchronize = transfers._stream_synchronize(lambda self: None)

    def passes() -> dict[str, Any]:
        return {
            "forward": lambda: [Stream().synchronize(), Event().synchronize()],
            "backward": lambda: [order.append("backward"), Event().synchronize()],
        }

    overlap = ForwardBackwardOverlap([world()], waits_in=["tests.overlap"])
    overlap.run(**passes())
    assert overlap.hand_overs == {"forward": 2, "backward": 1}
    assert order == ["backward", *["waited"] * 3]
    # Of other modules, one rank alone may wait, as for its data.
    elsewhere = ForwardBackwardOverlap([world()])
    with pytest.warns(UserWarning, match="no pass handed over"):
        elsewhere.run(**passes())
    assert elsewhere.hand_overs.total() == 0


@on_ranks(2)
def test_a_thread_that_belongs_to_no_pass_never_hands_over(rank: int) -> None:
    """It uses collectives of a named group's ranks, as an asynchronous checkpoint does."""
    other = dist.new_group(list(range(dist.get_world_size())))
    overlap = ForwardBackwardOverlap([world(), other])
    running: list[int] = []

    def thread() -> None:
        for _ in range(50):
            assert active_turns() is None
            dist.all_reduce(torch.ones(2), group=other)

    def side(me: int) -> None:
        for _ in range(20):
            running.append(me)
            assert running == [me], "both passes run"
            running.remove(me)
            dist.all_reduce(torch.ones(2))

    beside = threading.Thread(target=thread)
    beside.start()
    overlap.run(partial(side, 0), partial(side, 1))
    beside.join()
    overlap.check()
    assert overlap.hand_overs["forward"] == 20


@on_ranks(2)
def test_a_forked_pass_takes_turns_until_it_is_joined(rank: int) -> None:
    """What it writes to states, only its parent sees, once it has joined it."""
    owner = SimpleNamespace(value="before", other="before")
    overlap = ForwardBackwardOverlap([world()], states=[Attributes(owner, "value", "other")])
    noted: list[tuple[str, str]] = []

    def work(name: str) -> str:
        for _ in range(2):
            noted.append((name, owner.value))
            dist.all_reduce(torch.ones(2))
        return name

    def ahead() -> str:
        owner.value = "of the fork"
        return work("fork")

    def backward() -> str:
        owner.other = "of the backward"
        turns = active_turns()
        fork = turns.fork(ahead)
        work("gradients")
        result = turns.join(fork)
        noted.append(("joined", owner.value))
        assert owner.other == "of the backward"
        return result

    assert overlap.run(partial(work, "forward"), backward) == ("forward", "fork")
    assert noted == [
        *[("forward", "before"), ("gradients", "before"), ("fork", "of the fork")],
        *[("forward", "before"), ("gradients", "before"), ("fork", "of the fork")],
        ("joined", "of the fork"),
    ]
    assert vars(owner) == {"value": "of the fork", "other": "of the backward"}
    assert overlap.run_together(backward=backward) == ("fork",)


@on_ranks(2)
def test_forwards_side_by_side_have_the_same_logits(rank: int) -> None:
    model, overlap = Model(random.Random(4)), ForwardBackwardOverlap([world()])
    model.dropout = 0.0
    xs = [torch.randn(8, COLUMNS) for _ in range(3)]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            together = overlap.run_together(
                first=lambda: model(xs[0], 0),
                second=lambda: model(xs[1], 0),
                third=lambda: model(xs[2], 0),
            )
            assert all(map(torch.equal, together, [model(x, 0) for x in xs]))
            assert not any(loss.requires_grad for loss in together)
    assert overlap.hand_overs["third"] > 0


@on_ranks(2)
def test_a_backward_may_run_inside_any_pass(rank: int) -> None:
    """torch.compile traces gradients in the forward; on a device in the pass's own thread."""
    overlap = ForwardBackwardOverlap([world()])
    inside = torch.compile(lambda x: torch.tanh(x) * x, backend="aot_eager")

    def side(length: int) -> torch.Tensor:
        x = torch.ones(length, requires_grad=True)
        dist.all_reduce(torch.ones(1))
        inside(x).sum().backward()
        assert x.grad is not None
        return x.grad

    for length in (2, 3):
        ours = overlap.run(partial(side, length), partial(side, length + 5))
        assert all(map(torch.equal, ours, (side(length), side(length + 5))))


@on_ranks(2)
def test_coalesced_collectives_stay_coalesced(rank: int) -> None:
    def both() -> list[float]:
        a, b = torch.ones(2), torch.ones(2)
        with dist._coalescing_manager(group=world()):
            dist.all_reduce(a, group=world())
            dist.all_reduce(b, group=world())
        dist.all_reduce(a)
        return [*a.tolist(), *b.tolist()]

    overlap = ForwardBackwardOverlap([world()])
    assert overlap.run(both, both) == (both(), both())
    assert overlap.hand_overs["forward"] == 1


@on_ranks(2)
def test_a_backward_that_draws_random_numbers_is_refused(rank: int) -> None:
    """In order its numbers come before those of the next forward."""
    overlap = ForwardBackwardOverlap([world()])
    with pytest.raises(RuntimeError, match="the backward drew random numbers"):
        overlap.run(lambda: None, lambda: torch.rand(1))
    without = ForwardBackwardOverlap([world()], states=[])
    with pytest.warns(UserWarning, match="no pass handed over"):
        without.run(lambda: None, lambda: torch.rand(1))


def fail() -> None:
    raise KeyError("the transfer")


@pytest.mark.parametrize("in_wait", [False, True])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
@on_ranks(2)
def test_an_error_ends_all_passes_with_its_own_name(
    rank: int, failing: int, at: int, in_wait: bool
) -> None:
    """The named pass, of which the last is a fork, raises at a piece, or in the transfer after."""
    overlap, ended = ForwardBackwardOverlap([world()]), set[int]()
    # Its wait fails, as if another rank had died.
    work = SimpleNamespace(wait=fail)
    all_reduce = transfers.handing_over(lambda x, group=None, async_op=False: work)

    def run(me: int) -> None:
        try:
            for piece in range(4):
                if (me, piece) == (failing, at):
                    all_reduce(torch.ones(2)) if in_wait else fail()
                dist.all_reduce(torch.ones(2))
        except OtherPassError:
            ended.add(me)
            raise

    def parent() -> None:
        turns = active_turns()
        fork = turns.fork(partial(run, 3))
        try:
            run(1)
            turns.join(fork)
        except OtherPassError:
            ended.add(1)
            raise

    passes = {"first": partial(run, 0), "second": parent, "third": partial(run, 2)}
    with pytest.raises(KeyError, match="the transfer"):
        overlap.run_together(**passes)
    with pytest.warns(UserWarning, match="no pass handed over"):
        assert overlap.run(lambda: 1, lambda: 2) == (1, 2)
    if at == 1:  # before and after it, some passes have not begun or have ended
        assert ended == {0, 1, 2, 3} - {failing}


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    overlap = ForwardBackwardOverlap([world()])
    batch = torch.ones(1, 2)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    sharded = fully_shard(torch.nn.Linear(2, 2))
    for words, forward in (
        ("a pass cannot run others", lambda: overlap.run(lambda: 1, lambda: 2)),
        (r"outside of no_sync\(\) in a pass", lambda: model(batch)),
        ("a fully sharded module in a pass", lambda: sharded(batch)),
    ):
        with pytest.raises(RuntimeError, match=words):
            overlap.run(forward, lambda: None)
    reduced = lambda: (model(batch), dist.all_reduce(torch.ones(1)))  # noqa: E731
    with model.no_sync():
        overlap.run(reduced, lambda: None)
    with torch.no_grad():
        overlap.run(reduced, reduced)
    with pytest.raises(ValueError, match="no pass given"):
        overlap.run_together()
    with pytest.raises(ValueError, match="no group given"):
        ForwardBackwardOverlap([])


@pytest.mark.parametrize("replicas", [False, True])
@on_ranks(4)
def test_ranks_whose_passes_differ_are_told(rank: int, replicas: bool) -> None:
    """Ranks 0 and 1 are a group, 2 and 3 its replica; rank 3, or the replica, hands over less."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    overlap = ForwardBackwardOverlap([group], replicas=world() if replicas else None)

    def side(transfers: int) -> None:
        for _ in range(transfers):
            dist.all_reduce(torch.ones(1), group=group)

    overlap.run(partial(side, 1), partial(side, 1))
    if replicas and rank > 1:  # another number of micro-batches
        overlap.run(partial(side, 1), partial(side, 1))
    overlap.check()
    if replicas:
        overlap.run(partial(side, 1 + rank // 2), partial(side, 1))
    else:  # a point of one rank alone
        overlap.run(partial(side, 1), lambda: active_turns().reach_point("p", rank == 3))
    if replicas or rank > 1:
        with pytest.raises(RuntimeError, match=r"times in \d runs; the .* matched wrongly"):
            overlap.check()
    else:
        overlap.check()


@on_ranks(2)
def test_the_second_thread_has_the_callers_context(rank: int) -> None:
    overlap = ForwardBackwardOverlap([world()])

    def state() -> Any:
        x = torch.ones(2, 2, device="cpu")
        return (x @ x).dtype, torch.is_grad_enabled(), torch.ones(1).device.type

    plain = state()
    flops = FlopCounterMode(display=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), flops:
        changed = state()
        assert overlap.run(state, state) == (changed, changed)
    assert changed == (torch.bfloat16, False, "meta")
    assert overlap.run(state, state) == (plain, plain)
    assert flops.get_total_flops() == 3 * 2 * 2**3
    threads = {overlap.run(threading.get_ident, threading.get_ident)[1] for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


@on_ranks(2)
def test_weights_that_autocast_casts_once_are_cast_once(rank: int) -> None:
    """Around all passes, a cast is used by all of them, and gradients are added in bf16."""
    weight = torch.nn.Parameter(torch.randn(COLUMNS, COLUMNS))
    xs, gradients = [torch.randn(8, COLUMNS) for _ in range(3)], []
    overlap = ForwardBackwardOverlap([world()])

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = Moved.apply((x @ weight).float().tanh(), ("all_reduce", "all_reduce"))
        return x.pow(2).mean()

    for overlap.enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(xs[0])
            for x in xs[1:]:
                loss, _ = overlap.run(partial(forward, x), loss.backward)
            loss.backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert torch.equal(*gradients)


@on_ranks(2)
def test_a_recomputation_uses_the_callers_saved_tensor_hooks(rank: int) -> None:
    linear, packed = torch.nn.Linear(4, 4), list[bool]()
    overlap = ForwardBackwardOverlap([world()])

    def forward() -> torch.Tensor:
        x = torch.randn(2, 4, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(Moved.apply(linear(x), ("all_reduce", "nothing"))).sum(), x,
            use_reentrant=True,
        )  # fmt: skip

    def numbers(enabled: bool) -> int:
        overlap.enabled = enabled
        packed.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks
        in_this_thread = torch.autograd.set_multithreading_enabled(False)
        pack = hooks(lambda tensor: packed.append(True) or tensor, lambda tensor: tensor)
        with in_this_thread, pack:
            if saved_tensors_hooks() is None:
                pytest.skip("before torch 2.8 the hooks of a thread cannot be read")
            loss, _ = overlap.run(forward, forward().backward)
            loss.backward()
        return len(packed)

    assert numbers(True) == numbers(False)


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
        patch.setenv("COMMFUSE_OVERLAP", "0")
        overlap = ForwardBackwardOverlap([world()])
    order: list[str] = []
    overlap.run(lambda: order.append("forward"), lambda: order.append("backward"))
    assert (overlap.runs, order) == (0, ["backward", "forward"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMMFUSE_FB_OVERLAP", "0")
        with pytest.warns(FutureWarning, match="is now COMMFUSE_OVERLAP"):
            overlap = ForwardBackwardOverlap([world()])
    assert not overlap.enabled
