"""Records what one rank does in an iteration, in any form: its passes, its waits, its transfers.

The functions that all forms call are wrapped: Megatron's steps and layers, the kernel of weight
gradients (without gradient accumulation fusion they are part of the backward), and the collectives
of ``torch.distributed`` with their ``Work``.  Only one pass of a rank runs at a time: that of the
thread that called one of these functions last.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer

from commfuse_npu.kernels import cpu as kernels

from .timeline import LINKS, OTHER, WAITING, Span

_COMPUTES = (
    (schedules, "forward_step", "forward"),
    (schedules, "backward_step", "backward"),
    (TransformerLayer, "forward", "recomputation"),
    (kernels, "accumulate_weight_gradient", "weight gradients"),
)
_TRANSFERS = (
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "allreduce"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv"),
)
"""Methods of ``ProcessGroup`` in torch 2.7 to 2.13."""


class Recorder:
    """Records one iteration.

    Attributes:
        spans: what the rank did, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._begin = 0.0
        self._since = 0.0
        self._running = OTHER, OTHER
        # What each thread is in, innermost last.
        self._stacks: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        self._stacks[threading.get_ident()].append(self._running)
        self._numbers = {"forward": 0, "backward": 0}
        self._posted: dict[Any, tuple[str, float]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the functions in the block, which is the iteration."""
        with ExitStack() as undone:
            for owner, name, row in _COMPUTES:
                wrapper = self._computes(row, getattr(owner, name))
                undone.enter_context(mock.patch.object(owner, name, wrapper))
            for name in filter(functools.partial(hasattr, dist.ProcessGroup), _TRANSFERS):
                wrapper = self._posts(name.strip("_"), getattr(dist.ProcessGroup, name))
                undone.enter_context(mock.patch.object(dist.ProcessGroup, name, wrapper))
            undone.enter_context(mock.patch.object(dist.Work, "wait", self._waits(dist.Work.wait)))
            self._begin = time.perf_counter()
            yield
            self._run(self._running)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _run(self, entry: tuple[str, str]) -> None:
        """From now on this runs."""
        now = self._now()
        self.spans.append(Span(*self._running, self._since, now))
        self._running = entry
        self._since = now

    @contextmanager
    def _within(self, stack: list[tuple[str, str]], row: str, name: str) -> Iterator[None]:
        stack.append((row, name))
        self._run(stack[-1])
        try:
            yield
        finally:
            stack.pop()
            # After a pass of its own, a recomputation that ran ahead, its backward goes on.
            self._run(stack[-1] if stack else ("backward", f"backward {self._numbers['backward']}"))

    def _computes(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Number forwards and backwards; all else belongs to the backward that began last."""

        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            stack = self._stacks[threading.get_ident()]
            if row == "recomputation" and stack and stack[-1][0] == "forward":
                return function(*args, **kwargs)  # the layer's first run
            if row in self._numbers:
                self._numbers[row] += 1
            number = self._numbers.get(row, self._numbers["backward"])
            with self._within(stack, row, f"{row} {number}"):
                return function(*args, **kwargs)

        return compute

    def _waits(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any) -> Any:
            stack = self._stacks[threading.get_ident()]
            with self._within(stack, stack[-1][0] if stack else OTHER, WAITING):
                done = function(work, *args)
            if work in self._posted:
                self.spans.append(Span(LINKS, *self._posted.pop(work), self._now()))
            return done

        return wait

    def _posts(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """In flight until the future is done, or without one until the transfer was waited for."""

        def post(*args: Any, **kwargs: Any) -> Any:
            posted = name, self._now()
            work = function(*args, **kwargs)
            try:
                work.get_future().add_done_callback(
                    lambda _: self.spans.append(Span(LINKS, *posted, self._now()))
                )
            except RuntimeError:
                self._posted[work] = posted
            return work

        return post
