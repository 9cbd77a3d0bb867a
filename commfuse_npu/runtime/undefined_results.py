"""Leaves results of GEMMs and collectives undefined where nothing reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["results_are_undefined", "undefined_results"]

_PRODUCTS: dict[Callable[..., Any], int] = {
    torch.matmul: -1,
    torch.mm: -1,
    torch.Tensor.matmul: -1,
    torch.Tensor.mm: -1,
    torch.Tensor.__matmul__: -1,
    torch.nn.functional.linear: 0,
}
"""GEMMs, and which dimension of the second operand is the last one of the product."""


class _Products(TorchFunctionMode):
    """Allocates the results of GEMMs instead of computing them, inside autograd functions.

    Outside of them a product would be cut out of the graph, so it is computed.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        last = _PRODUCTS.get(function)
        if last is None or kwargs or len(args) < 2 or torch.is_grad_enabled():
            return function(*args, **(kwargs or {}))
        first, second = args[:2]
        return first.new_empty((*first.shape[:-1], second.shape[last]))


_this_thread = threading.local()


@contextmanager
def undefined_results() -> Iterator[None]:
    """Leave the results of GEMMs and of blocking collectives undefined in the block.

    In the thread that calls, on all ranks of the collectives alike.  Shapes, the autograd graph and
    the random numbers that are drawn stay the same.  Collectives are left out once
    ``commfuse_npu.overlap`` has wrapped them.
    """
    _this_thread.undefined = True
    try:
        with _Products():
            yield
    finally:
        _this_thread.undefined = False


def results_are_undefined() -> bool:
    """Whether this thread is inside :func:`undefined_results`."""
    return getattr(_this_thread, "undefined", False)
