"""GEMMs that sleep for as long as they would take: more ranks than cores, without sharing them.

With four ranks on two cores a real GEMM measures how the ranks share the cores, not how transfers
hide.  A sleeping one takes its modelled time, 2 m n k / rate, and no CPU; the transfers, their
copies and the host's own work stay real.  What such a GEMM returns is undefined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SleepingGemms"]

_aten = torch.ops.aten
# With the place of the first factor among the arguments.
_PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.bmm.default: 0,
    _aten.bmm.out: 0,
    _aten.addmm.default: 1,
    _aten.addmm.out: 1,
    _aten.addmm_.default: 1,
}
_IN_PLACE: set[Any] = {_aten.addmm_.default}


class SleepingGemms(TorchDispatchMode):
    """Inside the ``with`` block matrix products of torch sleep, in a backward too.

    Caught are the kernels that this project's calls end in; ``matmul`` and ``@`` are made of them.

    Args:
        gflops: the modelled speed of one rank, in 1e9 operations per second.

    Attributes:
        products: how many slept.
    """

    def __init__(self, gflops: float) -> None:
        super().__init__()
        self._rate = gflops * 1e9
        self.products = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = _PRODUCTS.get(func)
        if first is None:
            return func(*args, **kwargs)
        start = time.perf_counter()
        self.products += 1
        a, b = args[first], args[first + 1]
        shape = (*a.shape[:-1], b.shape[-1])
        seconds = 2.0 * math.prod(shape) * a.shape[-1] / self._rate
        if func in _IN_PLACE:
            out = args[0]
        else:
            out = kwargs.get("out")
            out = a.new_empty(shape) if out is None else out
        # The call itself and the allocation are part of the GEMM, as they are of a real one.
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return out
