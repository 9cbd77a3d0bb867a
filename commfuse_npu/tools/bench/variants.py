"""The ways to run a workload, by name.

=================  ===============================================================================
``p2p``            blocking: a direct exchange with all peers at once, then the GEMM (or the other
                   way round).  **The reference**: it runs at line rate, so no comparison benefits
                   from a slow collective algorithm.
``collective``     blocking: torch's collective.  gloo's reduce-scatter sends an all-reduce's bytes.
``coc-K``          the rows in K slices, a collective per slice, pipelined with the GEMMs: what
                   MindSpeed's CoC does, implemented from its description.
``slices-K``       the same with direct exchanges instead of collectives.
``megatron``       forward blocking; backward in Megatron's order: the input is gathered during
                   dgrad, the reduce-scatter runs during wgrad.  With torch's collectives.
``megatron-p2p``   the same with direct exchanges.
``ours-cK``        this project's ops, K chunks per block, as many lanes as peers.
                   ``-tT``: each chunk is T times as long as the next to arrive, shorter if T is
                   below 1.  ``-lL``: L lanes.  ``-wgrad``: weight gradients computed per arriving
                   block, which rounds differently.
``auto[-wgrad]``   this project's ops with the schedule, or the plain path, that tuning measures as
                   the fastest on first use over this link (:mod:`commfuse_npu.tuning`).
``fb-overlap``     the forward of a micro-batch overlapped with the backward of the previous one
                   (:mod:`commfuse_npu.overlap`), with the transfers of ``megatron-p2p``.
=================  ===============================================================================

Every round also measures ``compute`` (no communication) and ``communication`` (the same collectives
as blocking direct exchanges, no computation).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.tools.bench.shapes import WORKS

__all__ = ["COMMUNICATION", "COMPUTE", "REFERENCE", "Variant", "chosen", "is_ours", "of_group"]

COMPUTE, COMMUNICATION, REFERENCE = "compute", "communication", "p2p"

_CHUNKS = (1, 2, 4, 8)
_TAPERED = ((2, 1.5), (4, 1.5), (4, 2.0), (6, 1.5), (4, 0.5))
_SLICES = (2, 4, 8)


@dataclass(frozen=True)
class Variant:
    """One way to run a workload.

    Attributes:
        kind: ``compute``, ``communication``, ``blocking``, ``sliced``, ``megatron``,
            ``fused`` or ``turns``.
        direct: uses direct exchanges instead of torch's collectives.
        slices: for ``sliced``.
        schedule: for ``fused``.
        tuned: the schedule, or the order of hand-overs, is tuned.
        wgrad: how weight gradients are computed.
    """

    name: str
    kind: str
    direct: bool = True
    slices: int = 1
    schedule: Schedule | None = None
    tuned: bool = False
    wgrad: Wgrad = "whole"

    def applies_to(self, work: str) -> bool:
        """Whether it fits this workload: some need a backward, or several micro-batches."""
        if self.kind == "turns":
            return WORKS[work].micro_batches > 1
        return WORKS[work].backward or (self.kind != "megatron" and self.wgrad == "whole")


def of_group(size: int) -> list[Variant]:
    """All variants for a group of ``size`` ranks, the reference first."""
    lanes = max(1, size - 1)
    schedules = {
        f"ours-c{chunks}" + (f"-l{used}" if used < lanes else ""): Schedule("shifted", used, chunks)
        for chunks in _CHUNKS
        for used in range(lanes, 0, -1)
    }
    schedules |= {f"ours-c{c}-t{t:g}": Schedule("shifted", lanes, c, taper=t) for c, t in _TAPERED}
    base, four = Schedule("shifted", lanes), Schedule("shifted", lanes, 4)
    return [
        Variant(REFERENCE, "blocking"),
        Variant("collective", "blocking", direct=False),
        *(Variant(f"coc-{k}", "sliced", direct=False, slices=k) for k in _SLICES),
        *(Variant(f"slices-{k}", "sliced", slices=k) for k in _SLICES),
        Variant("megatron", "megatron", direct=False),
        Variant("megatron-p2p", "megatron"),
        *(Variant(name, "fused", schedule=schedule) for name, schedule in schedules.items()),
        Variant("ours-c4-wgrad", "fused", schedule=four, wgrad="blocks"),
        Variant("auto", "fused", schedule=base, tuned=True),
        Variant("auto-wgrad", "fused", schedule=base, tuned=True, wgrad="blocks"),
        Variant("fb-overlap", "turns", tuned=True),
    ]


def is_ours(name: str) -> bool:
    """Whether a variant of this name is this project's."""
    return name.startswith(("ours", "auto", "fb-overlap"))


def chosen(patterns: Sequence[str], size: int) -> list[Variant]:
    """The variants whose names match one of the patterns (``ours-*``), and the reference.

    Raises:
        ValueError: a pattern matches nothing.
    """
    variants = of_group(size)
    names = [variant.name for variant in variants]
    selected = {REFERENCE}
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ValueError(
                f"no variant for {size} ranks is called {pattern!r}; choose from {', '.join(names)}"
            )
        selected.update(matching)
    return [variant for variant in variants if variant.name in selected]
