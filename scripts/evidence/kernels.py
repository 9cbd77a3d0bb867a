"""How far the simulator's GEMMs and MindSpeed's fused kernel are off what others measured.

    python -m scripts.evidence kernels A2=lcoc_per_channel_8p_A2.csv A3=lcoc_per_channel_8p_A3.csv

The files are those of ``examples/allgather_matmul_dequant/performance_data`` in hicann/catccos: for
shapes ``m, k, n`` the times of an all-gather with a GEMM in int8 on 8 ranks, of the GEMM alone and
of the all-gather alone, in microseconds; ``m`` is of one rank.  Every second shape is left out of
what is derived here, the efficiency of GEMMs and the share that is hidden, and predicted from the
others.  Left out altogether are shapes with k or n below 512, which no layer has, and those where
more is hidden than there is to hide.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.machine import FusedKernel, Machine

__all__ = ["Measured", "Prediction", "main", "predict", "read"]

_MACHINES = {"A2": "ascend_910b_server", "A3": "ascend_910c_supernode"}
_RANKS, _LEAST, _FASTER_INT8 = 8, 512, 2


class Measured(NamedTuple):
    """One shape, over all ranks; seconds."""

    rows: int
    inner: int
    outer: int
    total: float
    gemm: float
    gather: float

    @property
    def hidden(self) -> float:
        """Of the shorter of GEMM and all-gather."""
        return (self.gemm + self.gather - self.total) / min(self.gemm, self.gather)


class Prediction(NamedTuple):
    """Errors on the shapes that were left out, as shares of what was measured.

    Attributes:
        fitted: efficiency of GEMMs, and the share that the kernel hides of shorter transfers.
    """

    fitted: tuple[float, float]
    gemm: list[float]
    total: list[float]


def read(path: Path) -> list[Measured]:
    """The shapes of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line holds other than numbers.
    """
    found = []
    # Its header names the last column in Chinese.
    for line in path.read_text(encoding="gbk").splitlines()[1:]:
        m, k, n, *micro = map(float, line.replace("\t", ",").split(",")[:6])
        if min(k, n) >= _LEAST:
            found.append(Measured(int(m) * _RANKS, int(k), int(n), *(1e-6 * t for t in micro)))
    return found


def predict(machine: Machine, shapes: Sequence[Measured]) -> Prediction:
    """Derive efficiency and hidden share from every second shape, and predict the others."""
    known, others = shapes[::2], shapes[1::2]
    int8 = replace(
        machine,
        cube_flops=_FASTER_INT8 * machine.cube_flops,
        hbm_bandwidth=_FASTER_INT8 * machine.hbm_bandwidth,
    )

    def time(of: Machine) -> Callable[[Measured], float]:
        return lambda one: of.gemm(one.rows, one.inner, one.outer)

    def off(efficiency: float) -> float:
        seconds = time(replace(int8, gemm_efficiency=efficiency))
        return statistics.median(seconds(one) / one.gemm for one in known) - 1

    low, high = 0.1, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if off(middle) > 0 else (low, middle)
    gemm = time(replace(int8, gemm_efficiency=high))
    hidden, hidden_gemm = (
        statistics.median(of) if of else 0.0
        for of in (
            [one.hidden for one in known if one.gemm >= one.gather],
            [one.hidden for one in known if one.gemm < one.gather],
        )
    )
    kernel = FusedKernel(hidden, hidden_gemm, machine.inside.rate)
    return Prediction(
        (high, hidden),
        [gemm(one) / one.gemm - 1 for one in others],
        [kernel.seconds(one.gemm, one.gather) / one.total - 1 for one in others],
    )


def main(argv: Sequence[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="A2=FILE", help="A2= or A3= and a file")
    lines = [
        "| | shapes | efficiency | hidden | GEMM off: median, 90 %, worst | kernel | left out |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for given in parser.parse_args(argv).files:
        name, _, path = given.partition("=")
        if name not in _MACHINES:
            parser.error(f"{given} begins with none of {', '.join(_MACHINES)} and =")
        try:
            every = read(Path(path))
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        shapes = [one for one in every if one.hidden <= 1]
        if len(shapes) < 4:
            parser.error(f"{path}: {len(shapes)} shapes with k and n from {_LEAST}; 4 at least")
        machine = Hardware.load(find_config(_MACHINES[name], "hardware")).machine()
        found = predict(machine, shapes)
        efficiency, hidden = found.fitted
        lines.append(
            f"| {name} | {len(shapes)} | {efficiency:.3f} | {hidden:.3f} | {_errors(found.gemm)} | "
            f"{_errors(found.total)} | {len(every) - len(shapes)} |"
        )
    print("\n".join(lines))
    return 0


def _errors(errors: Sequence[float]) -> str:
    ordered = sorted(map(abs, errors))
    ninety = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return f"{statistics.median(ordered):.1%}, {ninety:.1%}, {ordered[-1]:.1%}"
