"""The ways to run a work, by name.

=================  ===============================================================================
``p2p``            blocking: a direct exchange with all peers at once, then the GEMM (or the other
                   way round).  **The reference**: at line rate, so nobody's algorithm is beaten.
``collective``     blocking: torch's collective.  gloo's reduce-scatter sends an all-reduce's bytes.
``coc-K``          the rows in K slices, a collective per slice, pipelined with the GEMMs: what
                   MindSpeed's CoC does, written from its description.
``slices-K``       the same with direct exchanges in place of the collectives.
``ring``           blocks passed on between neighbours, partial sums accumulated on the way.
``megatron``       forward blocking; backward in Megatron's order: the input is gathered during
                   dgrad, the reduce-scatter runs during wgrad.  With torch's collectives.
``megatron-p2p``   the same with direct exchanges.
``ours-cK``        this project's ops, K chunks per block, as many lanes as there are peers.
                   ``-tT``: each chunk is T times as long as the next to arrive, shorter if T is
                   below 1.  ``-lL``: L lanes.  ``-wgrad``: weight gradients made of the blocks as
                   they arrive, which rounds differently.
``auto[-wgrad]``   this project's ops with the schedule that is fastest when it is tried out at the
                   first use over this link, or the plain path (:mod:`commfuse_npu.tuning`).
``fb-overlap``     the forward of a micro-batch beside the backward of the one before it
                   (:mod:`commfuse_npu.overlap`), with the transfers of ``megatron-p2p``.
=================  ===============================================================================

Besides these every round measures ``compute`` (no communication at all) and ``communication`` (the
same collectives by blocking direct exchange, no computation).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.tools.bench.shapes import MICROBATCHES

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "REFERENCE",
    "Variant",
    "applies_to",
    "chosen",
    "is_ours",
    "of_group",
]

COMPUTE, COMMUNICATION, REFERENCE = "compute", "communication", "p2p"

Kind = Literal[
    "compute", "communication", "blocking", "sliced", "ring", "megatron", "fused", "turns"
]

_CHUNKS = (1, 2, 4, 8)
_TAPERED = ((2, 1.5), (4, 1.5), (4, 2.0), (6, 1.5), (4, 0.5))
_SLICES = (2, 4, 8)
_WITH_BACKWARD = ("mlp", "attention", "layer", "layers", "micro-batches")


@dataclass(frozen=True)
class Variant:
    """One way to run a work.

    Attributes:
        direct: carried by direct exchanges rather than by torch's collectives.
        slices: for ``sliced``.
        schedule: for ``fused``.
        tuned: take the schedule, or the order of turns, as what may be varied.
        wgrad: how weight gradients are made.
    """

    name: str
    kind: Kind
    direct: bool = True
    slices: int = 1
    schedule: Schedule | None = None
    tuned: bool = False
    wgrad: Wgrad = "whole"


def of_group(size: int) -> list[Variant]:
    """All variants for a group of ``size`` ranks, the reference first."""
    found = [
        Variant(REFERENCE, "blocking"),
        Variant("collective", "blocking", direct=False),
        *(Variant(f"coc-{k}", "sliced", direct=False, slices=k) for k in _SLICES),
        *(Variant(f"slices-{k}", "sliced", slices=k) for k in _SLICES),
        Variant("ring", "ring"),
        Variant("megatron", "megatron", direct=False),
        Variant("megatron-p2p", "megatron"),
    ]
    for chunks in _CHUNKS:
        for lanes in range(size - 1, 0, -1):
            name = f"ours-c{chunks}" + (f"-l{lanes}" if lanes < size - 1 else "")
            found.append(Variant(name, "fused", schedule=Schedule("shifted", lanes, chunks)))
    every = Schedule("shifted", max(1, size - 1))
    for chunks, taper in _TAPERED:
        schedule = replace(every, chunks=chunks, taper=taper)
        found.append(Variant(f"ours-c{chunks}-t{taper:g}", "fused", schedule=schedule))
    four = replace(every, chunks=4)
    found.append(Variant("ours-c4-wgrad", "fused", schedule=four, wgrad="blocks"))
    found.append(Variant("auto", "fused", schedule=every, tuned=True))
    found.append(Variant("auto-wgrad", "fused", schedule=every, tuned=True, wgrad="blocks"))
    found.append(Variant("fb-overlap", "turns", tuned=True))
    return found


def is_ours(name: str) -> bool:
    """Whether a variant of this name is this project's."""
    return name.startswith(("ours", "auto", "fb-overlap"))


def applies_to(variant: Variant, work: str) -> bool:
    """Whether a variant is about this work: some need a backward, or micro-batches."""
    if variant.kind == "turns":
        return MICROBATCHES[work] > 1
    return work in _WITH_BACKWARD or (variant.kind != "megatron" and variant.wgrad == "whole")


def chosen(patterns: Sequence[str], size: int) -> list[Variant]:
    """The variants whose names match one of the patterns (``ours-*``), and the reference.

    Raises:
        ValueError: a pattern matches nothing.
    """
    everything = of_group(size)
    names = [variant.name for variant in everything]
    found = {REFERENCE}
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ValueError(
                f"no variant for {size} ranks is called {pattern!r}; choose from {', '.join(names)}"
            )
        found.update(matching)
    return [variant for variant in everything if variant.name in found]
