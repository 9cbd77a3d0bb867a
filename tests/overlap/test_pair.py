"""A forward and a backward that take turns, against one after the other: the same bits."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_npu.overlap import (
    Attributes,
    ForwardBackwardOverlap,
    OtherSideError,
    transfers,
    turns,
)
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD, FORWARD, Turns

ROWS, COLUMNS = 4, 6


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Moved(torch.autograd.Function):
    """A collective that keeps the shape, and another one in its backward."""

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
        full.sin()  # beside the transfer
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


class Model(torch.nn.Module):
    """Random layers: collectives, dropout, recomputation."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count = draw.randint(1, 5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, COLUMNS) for _ in range(count))
        self.kinds = [(draw.choice(KINDS), draw.choice(KINDS)) for _ in range(count)]
        self.recompute = [draw.random() < 0.4 for _ in range(count)]
        self.dropout = draw.choice((0.0, 0.2))
        self.seen = 0
        self.read: list[int] = []

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        self.seen = number  # state of a micro-batch, which a recomputation sets again
        for at in range(len(self.layers)):
            if self.recompute[at] and self.training:
                x = torch.utils.checkpoint.checkpoint(
                    self._recomputed, at, number, x, use_reentrant=False
                )
            else:
                x = self._layer(at, x)
        return x.pow(2).mean()

    def _recomputed(self, at: int, number: int, x: torch.Tensor) -> torch.Tensor:
        self.seen = number
        return self._layer(at, x)

    def _layer(self, at: int, x: torch.Tensor) -> torch.Tensor:
        x = Moved.apply(torch.tanh(self.layers[at](x)) * (1 + self.seen), self.kinds[at])
        return torch.nn.functional.dropout(x, self.dropout)


def trained(
    seed: int, enabled: bool, orders: bool
) -> tuple[list[torch.Tensor], list[float], torch.Tensor, int]:
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


def random_models(rank: int, seeds: range, orders: bool = False) -> int:
    """Against one after the other, in strict turns or in random orders."""
    pairs = 0
    for seed in seeds:
        ours, plain = trained(seed, True, orders), trained(seed, False, False)
        same = all(map(torch.equal, ours[0], plain[0])) and ours[1] == plain[1]
        assert same, f"seed {seed}"
        assert torch.equal(ours[2], plain[2]), f"random state after seed {seed}"
        pairs += ours[3]
    return pairs


@pytest.mark.parametrize("orders", [False, True])
def test_random_models(ranks: Any, orders: bool) -> None:
    assert min(ranks(2).run(random_models, range(25), orders)) > 25


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_a_thousand_random_models(ranks: Any, size: int) -> None:
    assert min(ranks(size).run(random_models, range(1000, 1500))) > 500


# ------------------------------------------------------------------------- order


def sequence(rank: int) -> list[str]:
    """What runs when: each side notes its pieces between transfers."""
    other = dist.new_group(list(range(dist.get_world_size())))
    overlap = ForwardBackwardOverlap([world()])
    noted: list[str] = []

    def side(name: str, transfers: int) -> Callable[[], str]:
        def run() -> str:
            for number in range(transfers):
                noted.append(f"{name}{number}")
                dist.all_reduce(torch.ones(2))
            noted.append(f"{name} end")
            return name

        return run

    assert overlap.run(side("f", 2), side("b", 3)) == ("f", "b")
    assert overlap.hand_overs == [2, 2]
    noted.append("|")

    def elsewhere() -> None:
        dist.all_reduce(torch.ones(2), group=other)
        dist.all_reduce(torch.ones(2), async_op=True, group=world())
        full = torch.empty(dist.get_world_size())
        dist.all_gather_into_tensor(full, torch.ones(1), async_op=True).wait()
        noted.append("not handed over")
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        noted.append("handed over")

    overlap.run(elsewhere, side("b", 0))
    dist.all_reduce(torch.ones(2))
    return noted


SEQUENCE = ["f0", "b0", "f1", "b1", "f end", "b2", "b end", "|"]
SEQUENCE += ["not handed over", "b end", "handed over"]


def test_sides_take_turns_at_blocking_transfers_of_named_groups(ranks: Any) -> None:
    assert ranks(2).run(sequence) == [SEQUENCE, SEQUENCE]


class Late:
    """The handle of a sum that is NaN until it is waited for, and of an input that is kept."""

    begun = 0

    def __init__(self, function: Callable[..., Any], tensor: torch.Tensor, group: Any) -> None:
        Late.begun += 1
        self.tensor, self.hidden = tensor, tensor.clone()
        self.work = function(self.hidden, group=group, async_op=True)
        tensor.fill_(float("nan"))

    def wait(self) -> None:
        assert torch.isnan(self.tensor).all()
        self.work.wait()
        self.tensor.copy_(self.hidden)


def late(rank: int) -> int:
    """Before :mod:`commfuse_npu.overlap` takes the function, as others may have."""
    own = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: Any = False):  # type: ignore[no-untyped-def]
        if not async_op:
            return own(tensor, group=group)
        return Late(own, tensor, group)

    hooked = transfers._collective(all_reduce, True)
    overlap = ForwardBackwardOverlap([world()])

    def side(value: float) -> Callable[[], float]:
        def run() -> float:
            total = torch.full((3,), value)
            for _ in range(3):
                hooked(total)
                total = total / dist.get_world_size()
            return float(total[0])

        return run

    assert overlap.run(side(2.0), side(5.0)) == (2.0, 5.0)
    return Late.begun


def test_nobody_reads_what_is_under_way(ranks: Any) -> None:
    assert ranks(2).run(late) == [6, 6]


# ------------------------------------------------------------------------ errors


def failing(rank: int, side: int, at: int) -> list[str]:
    """The named side raises at its piece ``at``; what is seen of it, and after it."""
    overlap = ForwardBackwardOverlap([world()])
    seen: list[str] = []

    def run(me: int) -> Callable[[], None]:
        def work() -> None:
            try:
                for piece in range(4):
                    if (me, piece) == (side, at):
                        raise KeyError(f"piece {piece}")
                    dist.all_reduce(torch.ones(2))
            except OtherSideError:
                seen.append(f"ended {me}")
                raise

        return work

    with pytest.raises(KeyError, match=f"piece {at}"):
        overlap.run(run(FORWARD), run(BACKWARD))
    assert active_turns() is None
    assert overlap.run(lambda: 1, lambda: 2) == (1, 2)
    return seen


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("side", [FORWARD, BACKWARD])
def test_an_error_ends_both_sides_with_its_own_name(ranks: Any, side: int, at: int) -> None:
    for seen in ranks(2).run(failing, side, at):
        # A backward that had not begun when the forward failed never sees it.
        assert seen == ([] if (side, at) == (FORWARD, 0) else [f"ended {1 - side}"])


def interrupted(rank: int, parked: bool) -> None:
    # A shell's background job ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    overlap = ForwardBackwardOverlap([world()])
    reached = []

    def forward() -> None:
        if parked:
            dist.all_reduce(torch.ones(2))
            reached.append("forward went on")

    def interrupt_main() -> None:
        # Python sees a signal just before it waits for a lock only when it has the lock.
        while Path(f"/proc/self/task/{os.getpid()}/stat").read_text().split()[2] != "S":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while active().error is None:
            time.sleep(0.01)

    def backward() -> None:
        interrupt_main()
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        reached.append("backward went on")

    with pytest.raises(KeyboardInterrupt):
        overlap.run(forward, backward)
    assert reached == []
    assert overlap.run(lambda: 1, lambda: 2) == (1, 2)


@pytest.mark.parametrize("parked", [True, False])
def test_ctrl_c_ends_both_sides(ranks: Any, parked: bool) -> None:
    ranks(2).run(interrupted, parked)


def refused(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    overlap = ForwardBackwardOverlap([world()])
    with pytest.raises(RuntimeError, match="a pair cannot contain another one"):
        overlap.run(lambda: overlap.run(lambda: 1, lambda: 2), lambda: 3)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="a backward inside the forward of a pair"):
        overlap.run(lambda: x.sum().backward(), lambda: None)
    with pytest.raises(RuntimeError, match="a backward inside the forward of a pair"):
        overlap.run(lambda: torch.autograd.grad(x.sum(), x), lambda: None)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"outside of no_sync\(\) in a pair"):
        overlap.run(lambda: model(torch.ones(1, 2)), lambda: None)
    with model.no_sync():
        overlap.run(lambda: model(torch.ones(1, 2)), lambda: None)
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="a fully sharded module in a pair"):
        overlap.run(lambda: sharded(torch.ones(1, 2)), lambda: None)
    with pytest.raises(ValueError, match="no group given"):
        ForwardBackwardOverlap([])


def test_what_is_refused(ranks: Any) -> None:
    ranks(2).run(refused)


# ----------------------------------------------------------------------- context


class Counted(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.calls += 1
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Dispatched.calls += 1
        return func(*args, **(kwargs or {}))


def diverged(rank: int, orders: bool) -> None:
    overlap = ForwardBackwardOverlap([world()])
    overlap.run(lambda: dist.all_reduce(torch.ones(1)), lambda: None)
    overlap.check()
    if orders:
        overlap.orders[None] = ((rank == 0,), ())
    else:  # turns of their own: each rank hands over as often as it is told
        overlap.run(lambda: [active().hand_over() for _ in range(rank)], lambda: None)
    overlap.check()


@pytest.mark.parametrize("orders", [False, True])
def test_ranks_that_hand_over_or_have_orders_that_differ_are_told(ranks: Any, orders: bool) -> None:
    told = rf"handed over \[\d, 0\] times in {2 - orders} pairs, other ranks .* matched wrongly"
    for outcome in ranks(2).outcomes(diverged, orders):
        assert re.search(told, str(outcome.error))


def context(rank: int) -> None:
    overlap = ForwardBackwardOverlap([world()])

    def state() -> Any:
        Counted.calls = Dispatched.calls = 0
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        modes = Counted.calls > 0, Dispatched.calls > 0
        return product.dtype, torch.is_grad_enabled(), modes

    assert len({state(), *overlap.run(state, state)}) == 1
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Counted(), Dispatched():
        expected = state()
        assert expected == (torch.bfloat16, False, (True, True))
        assert overlap.run(state, state) == (expected, expected)
    assert overlap.run(state, state)[1] == (torch.float32, True, (False, False))
    threads = {overlap.run(threading.get_ident, threading.get_ident)[1] for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_the_second_thread_has_the_callers_context(ranks: Any) -> None:
    ranks(2).run(context)


def profiled(rank: int) -> tuple[list[str], list[int]]:
    from torch._C._profiler import _ExperimentalConfig

    overlap = ForwardBackwardOverlap([world()])

    def side() -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(2))

    all_threads = _ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads) as profile:
        overlap.run(side, side)
    found = [event for event in profile.events() if "handed over" in event.name]
    found.sort(key=lambda event: event.time_range.start)
    return [event.name for event in found], overlap.hand_overs


def test_the_profiler_shows_the_turns(ranks: Any) -> None:
    names = [f"CommFuse: {side} handed over" for side in ("forward", "backward")]
    assert ranks(2).run(profiled) == [(3 * names, [3, 3])] * 2


def dtensor(rank: int) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def train(enabled: bool) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
        model = parallelize_module(torch.nn.Sequential(*layers), mesh, plan)
        overlap = ForwardBackwardOverlap([mesh.get_group()])
        overlap.enabled = enabled
        xs = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
        loss = model(xs[0]).sum()
        for x in xs[1:]:
            loss, _ = overlap.run(lambda x=x: model(x).sum(), loss.backward)
        loss.backward()
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        return grads, overlap.hand_overs

    (ours, handed), (plain, _) = train(True), train(False)
    assert all(map(torch.equal, ours, plain))
    return handed


def test_dtensors_transfers_are_places_to_hand_over(ranks: Any) -> None:
    for forwards, backwards in ranks(2).run(dtensor):
        assert forwards > 0
        assert backwards > 0


def host_waits(rank: int) -> list[str]:
    class Event:
        def synchronize(self) -> None:
            order.append("the host has waited")

    class Stream:
        record_event = Event
        synchronize = transfers._stream_synchronize(Event.synchronize)

    order: list[str] = []
    Event.synchronize = transfers._host_wait(Event.synchronize)  # type: ignore[method-assign]

    def forward() -> None:
        Stream().synchronize()
        Event().synchronize()

    overlap = ForwardBackwardOverlap([world()])
    overlap.run(forward, lambda: [order.append("backward"), Event().synchronize()])
    assert overlap.hand_overs == [2, 1]
    return order


def test_host_waits_are_places_to_hand_over(ranks: Any) -> None:
    waited = "the host has waited"
    assert ranks(2).run(host_waits) == [["backward", waited, waited, waited]] * 2


# ------------------------------------------------------------- turns by themselves


def off(rank: int) -> list[str]:
    os.environ["COMMFUSE_FB_OVERLAP"] = "0"
    try:
        overlap = ForwardBackwardOverlap([world()])
    finally:
        del os.environ["COMMFUSE_FB_OVERLAP"]
    order: list[str] = []
    overlap.run(lambda: order.append("forward"), lambda: order.append("backward"))
    assert overlap.pairs == 0
    return order


def test_the_environment_turns_it_off(ranks: Any) -> None:
    assert ranks(2).run(off) == [["backward", "forward"]] * 2


def test_each_side_finds_its_state_as_it_left_it() -> None:
    """A list that others hold, too, is emptied and filled in place."""

    class Owner:
        value = 0
        items: ClassVar[list[int]] = []

    owner, items = Owner(), Owner.items
    both = Turns([Attributes(owner, "value", "items")])
    found: list[int] = []
    kept: list[list[int]] = []

    def side(me: int, values: list[int]) -> None:
        if me == BACKWARD:
            both.begin()
        for value in values:
            owner.value = value
            items.append(value)
            both.hand_over()
            found.append(owner.value)
            kept.append(list(items))
            items.clear()
        both.end(me)

    second = threading.Thread(target=side, args=(BACKWARD, [20, 21, 22]))
    second.start()
    side(FORWARD, [10, 11])
    second.join(60)
    assert sorted(found) == [10, 11, 20, 21, 22]
    assert kept == [[value] for value in found]
    assert owner.items is items
    assert owner.value == 11
    assert both.hand_overs == [2, 2]


class Interrupt:
    """Raises KeyboardInterrupt in the main thread, before an instruction of run() or the turns."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename == turns.__file__ or code.co_name in ("run", "_run_side"):
            frame.f_trace_opcodes = True
            if event == "opcode":
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            return self.trace
        return None


def interrupted_anywhere(rank: int) -> int:
    """How many instructions there are."""
    overlap = ForwardBackwardOverlap([world()])
    for at in itertools.count(1):
        running: list[int] = []

        def side(me: int, count: int, running: list[int] = running) -> None:
            for _ in range(count):
                running.append(me)
                assert running == [me], "both sides run"
                running.remove(me)
                active().hand_over()

        interrupt = Interrupt(at)
        try:
            with interrupt:
                overlap.run(lambda s=side: s(FORWARD, 2), lambda s=side: s(BACKWARD, 3))
        except KeyboardInterrupt:
            assert interrupt.left == 0
        if active_turns() is not None:  # in the last instructions, when both sides have ended
            transfers._turns = None
        assert overlap.run(lambda: 1, lambda: 2) == (1, 2)
        if interrupt.left > 0:
            return at
    raise AssertionError


def active() -> Turns:
    found = active_turns()
    assert found is not None
    return found


def test_ctrl_c_at_any_instruction_ends_both_sides(ranks: Any) -> None:
    assert min(ranks(2).run(interrupted_anywhere, timeout=120)) > 200


def measured(rank: int) -> tuple[float, list[str]]:
    """Seconds of a hand-over, and in which threads the states of a side were put back."""
    seen: list[str] = []

    class State:
        def save(self) -> None:
            seen.append(threading.current_thread().name.split("_")[0])

        def restore(self, kept: None) -> None: ...

    overlap = ForwardBackwardOverlap([world()], states=[State()])  # type: ignore[list-item]
    return overlap.hand_over_seconds(), seen


def test_a_hand_over_is_measured_with_its_states(ranks) -> None:
    for seconds, seen in ranks(2).run(measured):
        assert seconds > 0
        assert {"MainThread", "commfuse-backward"} == set(seen)
        assert len(seen) > 2 * 16
