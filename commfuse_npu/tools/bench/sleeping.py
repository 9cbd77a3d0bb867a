"""GEMMs that sleep for as long as they would take: more ranks than cores, without sharing them.

With four ranks on two cores a real GEMM measures how the ranks share the cores, not how transfers
hide.  A sleeping one takes its modelled time and no CPU; the transfers, their copies and the host's
own work stay real.  What such a GEMM returns is undefined.

The model is an NPU's, because there lies what cutting a GEMM costs: its result is made in whole
tiles, on so many cores at a time, after a launch.  A piece whose tiles do not fill the cores in its
last round takes longer than its share, no matter whether rows or columns were cut.

A sleep ends late, by what the system takes to wake the process, and later while the cores are busy
with other ranks, which a GEMM on an engine of its own would not notice.  The next sleep is shorter
by that much, so that many small GEMMs sleep as long together as one large one.
"""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import torch
from typing_extensions import Self

__all__ = ["SleepingGemms", "modelled_seconds"]

_TILE = 128, 256
_CORES = 24
_RATE = 2.2e14
_LAUNCH = 5e-6
"""Of an Ascend 910B (A2), roughly: rows and columns of the result that a core makes at a time, the
cores, operations per second that all of them reach together, and seconds to launch a kernel."""


def modelled_seconds(
    m: int, n: int, k: int, gflops: float, *, scale: float = 1.0, batch: int = 1
) -> float:
    """What ``[batch, m, k] @ [batch, k, n]`` takes.

    It stands for a GEMM of ``scale m``, ``scale n`` and ``scale k`` on the modelled device, and
    takes as much longer than that as lets whole rounds of tiles reach ``gflops``.

    Args:
        gflops: 1e9 operations per second.
        scale: how many times narrower everything is than what it stands for.
    """
    rows, columns = _TILE
    tiles = batch * math.ceil(round(scale * m) / rows) * math.ceil(round(scale * n) / columns)
    rounds = math.ceil(tiles / _CORES)
    device = _LAUNCH + rounds * _CORES * 2.0 * rows * columns * scale * k / _RATE
    return device * _RATE / (gflops * 1e9) / scale**3


class SleepingGemms:
    """Inside the ``with`` block matrix products of torch on the CPU sleep, in a backward too.

    The kernels that this project's calls end in are replaced in torch's dispatcher, for the whole
    process; ``matmul`` and ``@`` are made of them, and nothing else is slowed down.

    Args:
        gflops, scale: see :func:`modelled_seconds`.

    Attributes:
        products: how many slept.
    """

    def __init__(self, gflops: float, scale: float = 1.0) -> None:
        self._gflops, self._scale = gflops, scale
        self._late = 0.0
        self.products = 0

    def __enter__(self) -> Self:
        kernels = {
            **dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), self._product),
            # The sum that they are added to is undefined as well, and so is its scale.
            "addmm": lambda total, a, b, **scales: self._product(a, b),
            "addmm.out": lambda total, a, b, *, out, **scales: self._product(a, b, out=out),
            "addmm_": lambda total, a, b, **scales: self._product(a, b, out=total),
        }
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, "CPU")
        return self

    def __exit__(self, *what: object) -> None:
        self._library._destroy()

    def settle(self) -> None:
        """Forget what the last sleep took too long: something else begins."""
        self._late = 0.0

    def _product(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        start = time.perf_counter()
        shape = (*a.shape[:-1], b.shape[-1])
        out = a.new_empty(shape) if out is None else out
        *batch, m, k = a.shape
        seconds = modelled_seconds(
            m, b.shape[-1], k, self._gflops, scale=self._scale, batch=math.prod(batch)
        )
        # The allocation is part of the GEMM, as it is of a real one.
        self._sleep(start, seconds)
        return out

    def _sleep(self, start: float, seconds: float) -> None:
        self.products += 1
        end = start + seconds - self._late
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self._late = -left
