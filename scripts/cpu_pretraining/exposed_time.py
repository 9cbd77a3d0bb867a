"""Time a rank is blocked in tensor- and context-parallel collectives that are not fused.

Counted, per rank, by a wall clock:
- synchronous collectives on the tensor-parallel group and on the context-parallel one (the
  all-to-alls of Ulysses), from call to return;
- for asynchronous ones the call itself and `.wait()`, not what runs in between;
- only calls made by code of `megatron.*` or `commfuse_npu.*` with exactly one of these groups:
  the all-gathers and reduce-scatters of the linear layers and the embedding, the all-to-alls, the
  all-reduces of the loss (and, without sequence parallelism, of the layers) and of the norm
  weights' gradients.

Waiting for a slower rank is part of it: gloo blocks until the partner arrives.

Not counted: the data-parallel reduction of gradients, the optimizer (its gradient norm included),
logging and checkpoints, and the peer-to-peer transfers of fused layers, which report their own
blocked time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
_CALLERS = ("megatron.", "commfuse_npu.")


@dataclass
class ExposedTime:
    """Seconds that this rank was blocked since the measurement started; take differences."""

    seconds: float = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class _TimedWork:
    """A handle of an asynchronous collective whose waiting is counted."""

    def __init__(self, work: Any, counter: ExposedTime) -> None:
        self._work = work
        self._counter = counter

    def wait(self, *args: Any) -> Any:
        with self._counter.counting():
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(collective: Callable[..., Any], counter: ExposedTime) -> Callable[..., Any]:
    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(_CALLERS) or not _is_counted(kwargs.get("group")):
            return collective(*args, **kwargs)
        with counter.counting():
            work = collective(*args, **kwargs)
        return _TimedWork(work, counter) if isinstance(work, dist.Work) else work

    return call


def _is_counted(group: Any) -> bool:
    counted = (
        parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        parallel_state.get_context_parallel_group(check_initialized=False),
    )
    return any(group is one for one in counted)


@contextmanager
def measure_exposed_time() -> Iterator[ExposedTime]:
    """Count inside the block; the wrapped functions are put back when it ends."""
    counter = ExposedTime()
    with ExitStack() as patches:
        for module, name in _BINDINGS:
            timed = _timed(getattr(import_module(module), name), counter)
            patches.enter_context(mock.patch(f"{module}.{name}", timed))
        yield counter
