"""What is measured: quick, full, or what the options ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["DEFAULT_GFLOPS", "LINKS", "Sweep", "full", "quick", "with_options"]

LINKS = {
    "mesh": "a link per pair of ranks (paced sockets)",
    "unpaced": "loopback without a rate",
    "cuda": "the links between the GPUs",
    "npu": "the links between the NPUs",
}
"""By their names in results."""

DEFAULT_GFLOPS = 60.0
"""Modelled speed of a rank whose GEMMs sleep: that of one core, so that both modes compare."""

_CROWDED_GFLOPS = 15.0
"""The same where ranks take turns on the cores: their Python and copies are part of the time."""

_ALL_RATIOS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)

_OTHERS = ("collective", "coc-?", "slices-?", "ring", "megatron*")
_OURS = ("auto*", "ours-c?", "ours-c4-wgrad", "fb-overlap")
_TWO_RANKS = (*_OTHERS, *_OURS, "ours-c4-t2", "ours-c6-t1.5")
_FOUR_RANKS = (*_OTHERS, *_OURS, "ours-c4-t0.5", "ours-c?-l1", "ours-c4-l2")
_EIGHT_RANKS = ("coc-?", "slices-?", "ring", "auto", "ours-c?")
_LARGE = (
    "collective",
    "coc-4",
    "slices-4",
    "slices-8",
    "ring",
    "megatron*",
    "auto*",
    "ours-c[148]",
)
"""Every way at its best, not every combination: lanes differ with several peers only."""


@dataclass(frozen=True)
class Sweep:
    """Works measured by one group of processes.

    Attributes:
        gflops: let GEMMs sleep, at this speed; ``None`` for real ones.
        variants: patterns of names.
    """

    ranks: int
    works: tuple[str, ...]
    ratios: tuple[float, ...]
    rounds: int
    variants: tuple[str, ...] = ("*",)
    gflops: float | None = None
    dtype: str = "fp32"

    @property
    def mode(self) -> str:
        if self.gflops is None:
            return "real GEMMs"
        return f"sleeping GEMMs ({self.gflops:g} GFLOPS modelled)"


def quick() -> list[Sweep]:
    """Less than 3 minutes on 2 cores: the single layers and the MLP, two ratios, few variants."""
    some = ("collective", "coc-4", "slices-4", "ring", "megatron*", "ours-c?")
    ratios = (0.5, 1.0)
    single = ("all-gather", "reduce-scatter")
    two = (*some, "ours-c6-t1.5")
    return [
        Sweep(2, single, ratios, 3, (*two, "auto")),
        Sweep(2, ("mlp",), ratios, 3, two),
        Sweep(2, single, ratios, 3, two, gflops=DEFAULT_GFLOPS),
        Sweep(4, single, ratios, 3, (*some, "auto", "ours-c4-t0.5"), gflops=DEFAULT_GFLOPS),
    ]


def full() -> list[Sweep]:
    """Less than 25 minutes on 2 cores: everything."""
    single, ratios = ("all-gather", "reduce-scatter"), _ALL_RATIOS
    asleep = DEFAULT_GFLOPS
    return [
        Sweep(2, single, ratios, 7, _TWO_RANKS),
        Sweep(2, ("mlp",), ratios, 5, _TWO_RANKS),
        Sweep(2, ("attention", "layer"), (0.5, 1.0), 3, _LARGE),
        Sweep(2, (*single, "mlp"), (0.5, 1.0), 3, _LARGE, dtype="bf16"),
        Sweep(4, single, (0.5, 1.0), 5, _FOUR_RANKS, gflops=asleep),
        Sweep(4, ("mlp",), (0.5, 1.0), 3, _LARGE, gflops=_CROWDED_GFLOPS),
        Sweep(8, single, (0.25, 0.5, 1.0, 1.5), 3, _EIGHT_RANKS, gflops=_CROWDED_GFLOPS),
    ]


def with_options(sweeps: Sequence[Sweep], given: argparse.Namespace) -> list[Sweep]:
    """The programme with what the options say in place of its own.

    ``ranks``, ``dtypes`` or ``sleep_gemm`` make a programme of their own out of the
    first sweep: every combination of them.  The others replace a value in every sweep.
    """
    chosen = list(sweeps)
    if given.ranks or given.dtypes or given.sleep_gemm is not None:
        model = replace(chosen[0], gflops=given.sleep_gemm)
        chosen = [
            replace(model, ranks=size, dtype=dtype)
            for size in given.ranks or (2,)
            for dtype in given.dtypes or ("fp32",)
        ]
    names = ("works", "ratios", "variants", "rounds")
    changes = {name: getattr(given, name) for name in names if getattr(given, name)}
    # Sweeps that became equal are measured once.
    return list(dict.fromkeys(replace(sweep, **changes) for sweep in chosen))
