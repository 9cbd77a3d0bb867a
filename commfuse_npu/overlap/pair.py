"""Runs the forward of one micro-batch beside the backward of another one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from commfuse_npu.overlap.states import RandomState, SideState
from commfuse_npu.overlap.transfers import take_turns_at_transfers
from commfuse_npu.overlap.turns import BACKWARD, FORWARD, Recording, Turns
from commfuse_npu.plan.turn_order import HandOverPoint, Order, best_order
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.eager_only import eager_only
from commfuse_npu.runtime.order_log import OrderLog

__all__ = ["ForwardBackwardOverlap"]

F = TypeVar("F")
B = TypeVar("B")


class ForwardBackwardOverlap:
    """Runs the forward of one micro-batch beside the backward of another one.

    Both use one compute stream and take turns: while one would wait for a collective of the named
    groups, the other computes.  No operation is split or added, so results are bitwise equal to
    running them one after the other.  In a training loop::

        overlap = ForwardBackwardOverlap([tensor_parallel_group])
        loss = forward(batches[0])
        for batch in batches[1:]:
            loss, _ = overlap.run(lambda: forward(batch), loss.backward)
        loss.backward()
        overlap.check()

    By default they take strict turns; :meth:`record` measures a pair and :meth:`choose_orders`
    then chooses a better order.  With ``COMMFUSE_FB_OVERLAP=0`` in the environment :meth:`run` runs
    the backward, then the forward.

    Args:
        groups: process groups whose collectives are hidden: those of tensor, expert and context
            parallelism, not of data or pipeline parallelism.  All ranks of a group must run the
            same pairs.
        states: state outside the autograd graph that forward and backward both write; each side
            keeps its own.  By default the random states.
        order_log: records the collectives of all pairs for ``commfuse-npu verify --log``.

    Attributes:
        enabled: whether :meth:`run` runs them side by side.
        orders: the chosen order by kind of pair; other kinds take strict turns.
        recorded: hand-over points of both sides, by kind, of the pair that was recorded last.
        pairs: number of pairs that ran side by side.
        hand_overs: how often forwards, and backwards, handed over.
    """

    def __init__(
        self,
        groups: Iterable[dist.ProcessGroup],
        states: Sequence[SideState] | None = None,
        order_log: OrderLog | None = None,
    ) -> None:
        named = list(groups)
        if not named:
            raise ValueError("no group given: pass the process groups whose collectives to hide")
        self.device, _ = device_backend(named[0])
        self._named = named
        self._log = order_log
        # The groups, with their numbers in the order log.
        self._groups: dict[dist.ProcessGroup | None, int] = {}
        for group in named:
            ranks = dist.get_process_group_ranks(group)
            self._groups[group] = order_log.transport(ranks, True) if order_log else 0
        # A collective without a group uses the default group.
        if dist.group.WORLD in named:
            self._groups[None] = self._groups[dist.group.WORLD]
        self.states = [RandomState(self.device)] if states is None else list(states)
        # One thread for all backwards: a new one would start with a cold allocator cache.
        self._second_thread = ThreadPoolExecutor(1, "commfuse-backward")
        self.enabled = enabled_by_environment()
        self.pairs = 0
        self.hand_overs = [0, 0]
        self.orders: dict[Hashable, Order] = {}
        self.recorded: dict[Hashable, tuple[list[HandOverPoint], list[HandOverPoint]]] = {}

    @eager_only
    def run(
        self, forward: Callable[[], F], backward: Callable[[], B], kind: Hashable = None
    ) -> tuple[F, B]:
        """Run both side by side, in the order chosen for this kind of pair; return both results.

        The forward runs in the calling thread, the backward in a second one, with the caller's
        device, current stream, autocast, gradient mode and torch modes.

        Raises:
            BaseException: the exception of the side that failed first; the other side was ended at
                its next transfer.
            RuntimeError: a backward inside the forward, ``DistributedDataParallel`` outside of
                ``no_sync()``, a fully sharded module, or a pair inside a pair.
        """
        if not self.enabled:
            result = backward()
            return forward(), result
        turns = Turns(self.states, self.orders.get(kind, ((), ())))
        context = _Context(self.device)

        def behind() -> B:
            with ExitStack() as stack:
                context.enter(stack)
                return turns.run(BACKWARD, backward)

        with take_turns_at_transfers(turns, self._groups, self._log):
            try:
                future = self._second_thread.submit(behind)
                result_f = turns.run(FORWARD, forward)
                result_b = future.result()
            except BaseException as error:  # Ctrl-C: the backward ends at its next transfer
                turns.end(FORWARD, error)
                self._second_thread.submit(int).result()  # after the backward
        if turns.error is not None:
            raise turns.error
        self.pairs += 1
        self.hand_overs = [a + b for a, b in zip(self.hand_overs, turns.hand_overs, strict=True)]
        return result_f, result_b

    @eager_only
    def record(
        self,
        forward: Callable[[], F],
        backward: Callable[[], B],
        kind: Hashable = None,
        look: Callable[[int, int | None], object] = lambda *_: None,
    ) -> tuple[F, B]:
        """Run one after the other and measure the time between hand-over points.

        Args:
            look: called with the side and the number of points it has passed: 0 at its beginning,
                after each point, and ``None`` at its end.  Its own time is not measured.
        """

        def measured(side: int, function: Callable[[], Any]) -> tuple[Any, list[HandOverPoint]]:
            turns = Recording(side, self.device, look)
            with take_turns_at_transfers(turns, self._groups, self._log):
                result = function()
                return result, turns.points()

        result_b, points_b = measured(BACKWARD, backward)
        result_f, points_f = measured(FORWARD, forward)
        self.recorded[kind] = points_f, points_b
        return result_f, result_b

    def choose_orders(self) -> None:
        """Choose an order for each recorded kind of pair; all ranks use that of the first rank.

        Collective: call it on all ranks of the groups.
        """
        self.orders = {kind: best_order(sides) for kind, sides in self.recorded.items()}
        for group in self._named:
            chosen = [self.orders]
            dist.broadcast_object_list(chosen, dist.get_global_rank(group, 0), group)
            self.orders = chosen[0]

    def check(self) -> None:
        """Compare the number of hand-overs so far, and the orders, with all ranks of each group.

        If they differ, collectives of different ranks were matched wrongly.  Call it before the
        optimizer changes weights.

        Raises:
            RuntimeError: the ranks differ.
        """
        digest = zlib.crc32(repr((self.hand_overs, sorted(self.orders.items(), key=repr))).encode())
        for group in self._named:  # in one order on all ranks
            if self._log is not None:
                name = f"{self.hand_overs} hand-overs, with the orders {digest:08x}"
                self._log.write("meet", self._groups[group], name)
            digests = torch.tensor([digest, -digest], device=self.device)
            dist.all_reduce(digests, dist.ReduceOp.MAX, group=group)
            if int(digests.sum()):
                raise RuntimeError(
                    f"rank {dist.get_rank()} handed over {self.hand_overs} times in {self.pairs} "
                    "pairs, other ranks of its group did not: their collectives were matched "
                    "wrongly; run the same pairs, with the same collectives, on all ranks"
                )


def enabled_by_environment() -> bool:
    """Whether ``COMMFUSE_FB_OVERLAP`` is not 0."""
    return os.environ.get("COMMFUSE_FB_OVERLAP", "1") != "0"


class _Context:
    """The thread-local state of torch of the thread that creates it.

    ``wait()`` makes the *current* stream wait, so both sides have to use the same stream.
    """

    def __init__(self, device: str) -> None:
        self._device = None if device == "cpu" else torch.get_device_module(device)
        if self._device is not None:
            self._index, self._stream = self._device.current_device(), self._device.current_stream()
        self._gradients = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device))
        ]
        self._functions = _get_current_function_mode_stack()
        self._dispatches = _get_current_dispatch_mode_stack()

    def enter(self, stack: ExitStack) -> None:
        """Set it in this thread until the stack is closed."""
        if self._device is not None:
            self._device.set_device(self._index)
            stack.enter_context(self._device.stream(self._stream))
        stack.enter_context(torch.set_grad_enabled(self._gradients))
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        for mode in self._functions:
            stack.enter_context(mode)
        for mode in self._dispatches:
            _push_mode(mode)
            stack.callback(_pop_mode)
