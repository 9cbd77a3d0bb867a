"""Time a rank is blocked in tensor- and context-parallel collectives that are not fused.

Counted, per rank, by a wall clock: collectives that code of `megatron.*` or `commfuse_npu.*` calls
on the tensor-parallel group or on the context-parallel one (the all-gathers and reduce-scatters of
the linear layers and the embedding, the all-to-alls of Ulysses, the all-reduces of the loss and of
the norm weights' gradients), from call to return; of asynchronous ones the call and `.wait()`.

Waiting for a slower rank is part of it: gloo blocks until the partner arrives. Not counted are data
parallelism, the optimizer, checkpoints, and the transfers of fused layers, which count their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["ExposedTime", "measure_exposed_time"]

# Several of these are bound at import, so each binding is wrapped where it is looked up. A name
# that is gone is an AttributeError: better than a number that silently misses collectives.
_BINDINGS = (
    ("megatron.core.tensor_parallel.layers", "dist_all_gather_func"),
    ("megatron.core.tensor_parallel.layers", "dist_reduce_scatter_func"),
    ("megatron.core.tensor_parallel.mappings", "dist_all_gather_func"),
    ("megatron.core.tensor_parallel.mappings", "dist_reduce_scatter_func"),
    ("commfuse_npu.runtime.collectives", "_all_gather"),
    ("commfuse_npu.runtime.collectives", "_reduce_scatter"),
    ("torch.distributed", "all_reduce"),
    ("torch.distributed", "all_gather_into_tensor"),
    ("torch.distributed", "all_to_all_single"),
)


class ExposedTime:
    """Seconds that this rank was blocked since the measurement started; take differences."""

    seconds = 0.0

    def timed(self, blocking: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``blocking`` returns, its time counted."""
        start = time.perf_counter()
        try:
            return blocking(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


class _TimedWork:
    """A handle of an asynchronous collective whose waiting is counted."""

    def __init__(self, work: Any, counter: ExposedTime) -> None:
        self._work = work
        self._counter = counter

    def wait(self, *args: Any) -> Any:
        return self._counter.timed(self._work.wait, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(collective: Callable[..., Any], counter: ExposedTime) -> Callable[..., Any]:
    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        groups = (
            parallel_state.get_tensor_model_parallel_group(check_initialized=False),
            parallel_state.get_context_parallel_group(check_initialized=False),
        )
        counted = any(kwargs.get("group") is group for group in groups)
        if not counted or not caller.startswith(("megatron.", "commfuse_npu.")):
            return collective(*args, **kwargs)
        work = counter.timed(collective, *args, **kwargs)
        return _TimedWork(work, counter) if isinstance(work, dist.Work) else work

    return call


@contextmanager
def measure_exposed_time() -> Iterator[ExposedTime]:
    """Count inside the block; the wrapped functions are put back when it ends."""
    counter = ExposedTime()
    with ExitStack() as patches:
        for module, name in _BINDINGS:
            timed = _timed(getattr(import_module(module), name), counter)
            patches.enter_context(mock.patch(f"{module}.{name}", timed))
        yield counter
