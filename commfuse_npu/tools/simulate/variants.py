"""The ways to run a tensor-parallel layer, by name.

=====================  ===========================================================================
``compute``            no communication at all: what everything is measured against
``plain-mesh``         every collective blocking, all its transfers at once.  **The reference.**
``plain-ring``         every collective blocking, n-1 steps between neighbours
``megatron``           Megatron's order, with plain collectives: in the backward of a
                       column-parallel layer the input is gathered during dgrad, and the sum of
                       dgrad is scattered during wgrad
``coc-K``              what CoC does, as MindSpeed describes it: K slices of rows, a collective
                       per slice on a stream of its own, pipelined with the GEMMs; then a copy that
                       puts rows in order
``mc2``                a fused kernel, taken as ideal: GEMM and transfers overlap tile by tile, and
                       one tile remains at one end.  Its limits: 2, 4 or 8 ranks of one node and
                       inner dimensions of 256 to 65534 (else plain), and Megatron's order in the
                       backward of column-parallel layers
``ring``               this project's pipeline over neighbours only
``commfuse-cK-lL``     this project's ops, K chunks per block, L lanes; ``-attention``: attention
                       is split by queries and pipelined with its output projection;
                       ``-tT``: a chunk is T times as long as the next to arrive; ``-wgrad``: a
                       weight gradient per arriving block, which changes its rounding
=====================  ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from commfuse_npu.plan import Schedule

__all__ = ["COMPUTE_ONLY", "REFERENCE", "Variant", "Wgrad", "direct", "fused", "variants"]

Kind = Literal["compute", "plain", "megatron", "sliced", "kernel", "fused"]

Wgrad = Literal["whole", "blocks"]
"""As :data:`commfuse_npu.ops.weight_gradient.Wgrad`, which needs torch."""

_SLICES = (2, 4, 8)


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        ring: whether plain collectives go around a ring instead of straight to every peer.
        slices: for ``sliced``.
        schedule: for ``fused``.
        attention: for ``fused``, whether attention is part of the pipeline.
        wgrad: for ``fused``, how weight gradients are made.
    """

    name: str
    kind: Kind
    ring: bool = False
    slices: int = 1
    schedule: Schedule | None = None
    attention: bool = False
    wgrad: Wgrad = "whole"


COMPUTE_ONLY = Variant("compute", "compute")
REFERENCE = Variant("plain-mesh", "plain")


def direct(size: int, members_per_node: int) -> Schedule:
    """Transfers straight to every peer, the own node first if the group spans nodes."""
    if 1 < members_per_node < size:
        return Schedule("two_level", max(1, size - 1), node_size=members_per_node)
    return Schedule("shifted", max(1, size - 1))


def fused(
    base: Schedule,
    lanes: int,
    chunks: int,
    *,
    taper: float = 1.0,
    attention: bool = False,
    wgrad: Wgrad = "whole",
) -> Variant:
    """This project's ops.

    Args:
        base: the schedule apart from lanes, chunks and taper; see :func:`direct`.
    """
    name = f"commfuse-c{chunks}-l{lanes}" + (f"-t{taper:g}" if taper != 1 else "")
    name += ("-attention" if attention else "") + ("-wgrad" if wgrad == "blocks" else "")
    schedule = replace(base, lanes=lanes, chunks=chunks, taper=taper)
    return Variant(name, "fused", schedule=schedule, attention=attention, wgrad=wgrad)


def variants(
    size: int, members_per_node: int, lanes: int, chunks: tuple[int, ...] = (1, 2, 4)
) -> list[Variant]:
    """All variants for a group, the reference first.

    Args:
        lanes: for CommFuse, what suits the links; 2 lanes and 1 chunk, the options' defaults, are
            there besides.
    """
    base = direct(size, members_per_node)
    found = [
        REFERENCE,
        Variant("plain-ring", "plain", ring=True),
        Variant("megatron", "megatron"),
        *(Variant(f"coc-{k}", "sliced", slices=k) for k in _SLICES),
        Variant("mc2", "kernel"),
        Variant("ring", "fused", schedule=Schedule("ring", 1, 1)),
        fused(base, min(2, max(1, size - 1)), 1),
        *(fused(base, lanes, k) for k in chunks),
        fused(base, lanes, 6, taper=1.5),
        fused(base, lanes, chunks[-1], wgrad="blocks"),
        fused(base, lanes, chunks[-1], attention=True),
        fused(base, lanes, chunks[-1], attention=True, wgrad="blocks"),
    ]
    return list({variant.name: variant for variant in found}.values())
