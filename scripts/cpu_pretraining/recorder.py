"""Records what one rank does in an iteration, in any form: its passes, its waits, its transfers.

The functions that all forms call are wrapped: Megatron's steps and layers, the kernel of weight
gradients (without gradient accumulation fusion they are part of the backward), and the collectives
of ``torch.distributed`` with their ``Work``.  Only one pass of a rank runs at a time: that of the
thread that called one of these functions last.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer

from commfuse_npu.kernels import cpu as kernels

from .timeline import LINKS, OTHER, WAITING, RecordedSpan

_TRANSFERS = (
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "allreduce"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "send", "recv"),
)
"""Methods of ``ProcessGroup`` in torch 2.7 to 2.13."""
_WRAPPED = (
    (schedules, "forward_step", "forward"),
    (schedules, "backward_step", "backward"),
    (TransformerLayer, "forward", "recomputation"),
    (kernels, "accumulate_weight_gradient", "weight gradients"),
    (dist.Work, "wait", WAITING),
    *((dist.ProcessGroup, name, LINKS) for name in _TRANSFERS if hasattr(dist.ProcessGroup, name)),
)

Entry = tuple[str, str]
"""What a thread does: the row and the name of a span."""


class Recorder:
    """Records one iteration.

    Attributes:
        spans: what the rank did, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []
        self._begin = self._since = 0.0
        self._running: Entry = (OTHER, OTHER)
        self._threads: dict[int, Entry | None] = {threading.get_ident(): self._running}
        self._numbers = {"forward": 0, "backward": 0}
        self._posted: dict[Any, tuple[str, float]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Wrap the functions in the block, which is the iteration."""
        with ExitStack() as undone:
            for owner, name, row in _WRAPPED:
                wrap = {LINKS: self._posts, WAITING: self._waits}.get(row, self._computes)
                wrapper = wrap(name if row == LINKS else row, getattr(owner, name))
                undone.enter_context(mock.patch.object(owner, name, wrapper))
            self._begin = time.perf_counter()
            yield
            self._run(None)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _run(self, entry: Entry | None) -> None:
        """From now on the calling thread runs, with this entry.

        Without one, a pass of its own has ended, and the backward goes on that forked it.
        """
        now = self._now()
        self.spans.append(RecordedSpan(*self._running, self._since, now))
        self._since = now
        self._threads[threading.get_ident()] = entry
        self._running = entry or ("backward", f"backward {self._numbers['backward']}")

    def _row(self) -> str:
        return (self._threads.get(threading.get_ident()) or (OTHER, OTHER))[0]

    def _call(self, entry: Entry, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._threads.get(threading.get_ident())
        self._run(entry)
        try:
            return function(*args, **kwargs)
        finally:
            self._run(before)

    def _computes(self, row: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Number forwards and backwards; all else belongs to the backward that began last."""

        @functools.wraps(function)
        def compute(*args: Any, **kwargs: Any) -> Any:
            if row == "recomputation" and self._row() == "forward":
                return function(*args, **kwargs)  # the layer's first run
            if row in self._numbers:
                self._numbers[row] += 1
            number = self._numbers.get(row, self._numbers["backward"])
            return self._call((row, f"{row} {number}"), function, *args, **kwargs)

        return compute

    def _waits(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any) -> Any:
            done = self._call((self._row(), name), function, work, *args)
            if work in self._posted:
                self.spans.append(RecordedSpan(LINKS, *self._posted.pop(work), self._now()))
            return done

        return wait

    def _posts(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """In flight until the future is done, or without one until the transfer was waited for."""

        def post(*args: Any, **kwargs: Any) -> Any:
            posted = name.strip("_"), self._now()
            work = function(*args, **kwargs)
            try:
                work.get_future().add_done_callback(
                    lambda _: self.spans.append(RecordedSpan(LINKS, *posted, self._now()))
                )
            except RuntimeError:
                self._posted[work] = posted
            return work

        return post
