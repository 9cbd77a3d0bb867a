"""GEMMs that sleep for their modeled time, so that more ranks than cores can be measured.

With four ranks on two cores, real GEMMs measure how the ranks share the cores, not how transfers
are hidden.  A sleeping GEMM takes its modeled time and no CPU; the transfers, their copies and the
host's own work stay real.  The values that such a GEMM returns are undefined.

The model is that of an NPU, where splitting a GEMM has a cost: its result is computed in whole
tiles, on a number of cores at a time, after a launch.  A piece whose tiles do not fill the cores in
the last round takes longer than its share, whether rows or columns are split.

A sleep ends late, because the system needs time to wake the process, and more so while other ranks
use the cores; a GEMM on its own engine would not be delayed.  The next sleep is shortened by the
delay, so that many small GEMMs sleep as long in total as one large one.
"""

import math
import time
import warnings
from typing import Any

import torch
from typing_extensions import Self

_TILE = 128, 256
_CORES = 24
_RATE = 2.2e14
_LAUNCH = 5e-6
"""Approximately an Ascend 910B (A2): rows and columns of the result tile of a core, number of
cores, operations per second of all cores together, and seconds to launch a kernel."""


def modeled_seconds(
    m: int, n: int, k: int, gflops: float, *, scale: float = 1.0, batch: int = 1
) -> float:
    """Seconds for ``[batch, m, k] @ [batch, k, n]``.

    It represents a GEMM of ``scale m``, ``scale n`` and ``scale k`` on the modeled device, slowed
    down such that full rounds of tiles reach ``gflops``.

    Args:
        gflops: 1e9 operations per second.
        scale: factor by which all widths are smaller than those of the represented GEMM.
    """
    rows, columns = _TILE
    tiles = batch * math.ceil(round(scale * m) / rows) * math.ceil(round(scale * n) / columns)
    rounds = math.ceil(tiles / _CORES)
    device = _LAUNCH + rounds * _CORES * 2.0 * rows * columns * scale * k / _RATE
    return device * _RATE / (gflops * 1e9) / scale**3


class SleepingGemms:
    """Context manager in which torch's matrix products on the CPU sleep, also in a backward.

    It replaces the kernels that this project's calls use in torch's dispatcher, for the whole
    process; ``matmul`` and ``@`` are based on them.  Nothing else is slowed down.  Use one for work
    that belongs together: a sleep is shortened by the delay of the one before.

    Args:
        gflops, scale: see :func:`modeled_seconds`.
    """

    def __init__(self, gflops: float, scale: float = 1.0) -> None:
        self._gflops = gflops
        self._scale = scale
        self._late = 0.0

    def __enter__(self) -> Self:
        kernels = {
            **dict.fromkeys(("mm", "mm.out", "bmm"), self._product),
            # The sum to which the product is added is undefined as well, and so is its scale.
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

    def _product(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        start = time.perf_counter()
        shape = (*a.shape[:-1], b.shape[-1])
        out = a.new_empty(shape) if out is None else out
        *batch, m, k = a.shape
        seconds = modeled_seconds(
            m, b.shape[-1], k, self._gflops, scale=self._scale, batch=math.prod(batch)
        )
        # The allocation is part of the GEMM, as it is of a real one.
        self._sleep(start, seconds)
        return out

    def _sleep(self, start: float, seconds: float) -> None:
        end = start + seconds - self._late
        while (remaining := end - time.perf_counter()) > 0:
            time.sleep(remaining)
        self._late = -remaining
