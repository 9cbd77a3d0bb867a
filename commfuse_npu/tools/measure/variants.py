"""The forms in which the same layers run, by name.

================  ================================================================================
``p2p``           blocking: a collective, then the GEMM, or the other way round.  **The reference**:
                  on a CPU its collectives are direct exchanges with all peers at once, at the rate
                  of the links, so no comparison benefits from a slow collective algorithm.
``slices-K``      the rows in K slices, a collective per slice, pipelined with the GEMMs: what
                  MindSpeed's CoC does, implemented from its description.
``megatron``      forward blocking; backward in Megatron's order: the input is gathered during
                  dgrad, the reduce-scatter runs during wgrad.
``ours-cK``       this project's ops, K chunks per block, as many lanes as peers.
``auto[-wgrad]``  this project's ops with the schedule, or the plain path, that tuning measures as
                  the fastest on first use over these links (:mod:`commfuse_npu.tuning`).
                  ``-wgrad``: weight gradients per arriving block, which rounds differently.
``fb-overlap``    the forward of a micro-batch overlapped with the backward of the previous one
                  (:mod:`commfuse_npu.overlap`), with the transfers of ``megatron``.
================  ================================================================================

Every round also measures ``compute``: the same without any communication.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import Wgrad

__all__ = ["COMPUTE", "NAMES", "REFERENCE", "Variant", "is_ours", "variants"]

COMPUTE, REFERENCE = "compute", "p2p"

_SLICES, _CHUNKS = (2, 4, 8), (1, 4, 8)


@dataclass(frozen=True)
class Variant:
    """One form.

    Attributes:
        kind: ``compute``, ``blocking``, ``sliced``, ``megatron``, ``fused`` or ``turns``.
        slices: for ``sliced``.
        schedule: for ``fused``.
        tuned: the schedule, or the order of hand-overs, is tuned.
        wgrad: how weight gradients are computed.
    """

    name: str
    kind: str
    slices: int = 1
    schedule: Schedule | None = None
    tuned: bool = False
    wgrad: Wgrad = "whole"


def variants(size: int) -> list[Variant]:
    """All forms for a group of ``size`` ranks, the reference first."""
    lanes = max(1, size - 1)
    base = Schedule("shifted", lanes)
    return [
        Variant(REFERENCE, "blocking"),
        *(Variant(f"slices-{k}", "sliced", slices=k) for k in _SLICES),
        Variant("megatron", "megatron"),
        *(Variant(f"ours-c{k}", "fused", schedule=Schedule("shifted", lanes, k)) for k in _CHUNKS),
        Variant("auto", "fused", schedule=base, tuned=True),
        Variant("auto-wgrad", "fused", schedule=base, tuned=True, wgrad="blocks"),
        Variant("fb-overlap", "turns", tuned=True),
    ]


NAMES: Collection[str] = [variant.name for variant in variants(2)]
"""The names of all forms."""


def is_ours(name: str) -> bool:
    """Whether a form of this name is this project's."""
    return name.startswith(("ours", "auto", "fb-overlap"))
