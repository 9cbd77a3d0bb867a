"""The ways to run a tensor-parallel layer, by name.

=====================  ===========================================================================
``compute``            no communication at all: the baseline of all comparisons
``plain-mesh``         every collective blocking, all its transfers at once.  **The reference.**
``megatron``           Megatron's order, with plain collectives: in the backward of a
                       column-parallel layer the input is gathered during dgrad, and the sum of
                       dgrad is scattered during wgrad
``coc-K``              CoC as MindSpeed describes it: K slices of rows, a collective per slice on a
                       separate stream, pipelined with the GEMMs; then a copy that restores the
                       order of rows
``coc-fused``          CoC as kernels (``--coc-fused-kernel``), for 8 ranks of a node: each hides a
                       share of the shorter of GEMM and transfer, as others measured; Megatron's
                       order in the backward of column-parallel layers (read in MindSpeed 26.1.0)
``mc2``                ``--use-ascend-mc2`` (read in MindSpeed@028de58, which says that it is not
                       for A3, but does not refuse it there): gathers before a GEMM and
                       reduce-scatters after one are kernels that are tiled by the host's formula
                       (:mod:`commfuse_npu.tools.simulate.mc2`), for 2, 4 or 8 ranks of a full mesh,
                       up to 32 on a ring, and inner dimensions of 256 to 65534, otherwise plain;
                       Megatron's order in the backward of column-parallel layers
``commfuse-cK-lL``     this project's ops, K chunks per block, L lanes; ``commfuse-cK-collective``:
                       a chunk as one collective; ``-tT``: a chunk is T times as long as the next
                       to arrive; ``-wgrad``: the weight gradient of a row-parallel layer per
                       arriving block, which changes its rounding; ``-once``: partial sums in one
                       pass, rounded once (fp32), instead of one after the other.  The second gather
                       of a column-parallel layer's input starts before the weight gradient of the
                       row-parallel layer after it.  If GEMMs hide its collectives anyway, a
                       column-parallel layer's backward runs in Megatron's order
                       (:mod:`commfuse_npu.hardware.machine`)
``commfuse-tuned-lL``  the same with the fastest chunks for each operation, as batches or as
                       collectives, or Megatron's order: what ``--commfuse-tuning on`` searches
``commfuse-fb``        ``--commfuse-fb-overlap``: forward and backward of two micro-batches
                       alternate (:mod:`commfuse_npu.tools.simulate.fb_overlap`); passes without a
                       partner, and work outside of the layers, in Megatron's order
=====================  ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from commfuse_npu.plan import Schedule, default_shape
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.tools.simulate.mc2 import RANKS

__all__ = ["COC", "COC_FUSED", "COMPUTE_ONLY", "FB_OVERLAP", "MC2", "MEGATRON", "REFERENCE", "Kind",
           "Role", "Sums", "Variant", "Way", "Wgrad", "direct", "fused", "together",
           "variants"]  # fmt: skip

Kind = Literal["compute", "plain", "megatron", "sliced", "kernel", "mc2", "fused", "fb_overlap"]

Role = Literal["ours", "today", "rival", "plain"]

Sums = Literal["ordered", "once"]
"""How partial sums are added: one after the other, or all in one pass."""

Way = Schedule | int | None
"""How an operation is run: by a schedule, in a number of slices, or (``None``) by collectives in
Megatron's order."""

_SLICES = (2, 4, 8)


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        way: for all operations that ``chosen`` does not name.
        wgrad: for ``fused``, how weight gradients are computed.
        sums: for ``fused``, how partial sums are added.
        collectives_from: for ``fused``, number of outputs per rank from which the backward of
            column-parallel layers runs by collectives in Megatron's order.
        tuned: for ``fused``, the ways from which each operation takes its fastest.
        chosen: the ways of individual operations, by name.
    """

    name: str
    kind: Kind
    way: Way = None
    wgrad: Wgrad = "whole"
    sums: Sums = "ordered"
    collectives_from: int | None = None
    tuned: tuple[Way, ...] = ()
    chosen: tuple[tuple[str, Way], ...] = ()

    @property
    def schedule(self) -> Schedule | None:
        return self.way if isinstance(self.way, Schedule) else None

    @property
    def role(self) -> Role:
        """The user's view of it: this project's, what runs today, a rival, or plain."""
        roles: dict[Kind, Role] = {"fused": "ours", "fb_overlap": "ours", "megatron": "today"}
        rivals = self.kind in ("sliced", "kernel", "mc2")
        return roles.get(self.kind, "rival" if rivals else "plain")

    @property
    def ours(self) -> bool:
        return self.role == "ours"

    @property
    def other_rounding(self) -> str:
        """What is summed differently from Megatron; empty if the bits equal Megatron's."""
        notes = ["weight gradients are summed block by block"] if self.wgrad != "whole" else []
        notes += ["partial sums are rounded once"] if self.sums == "once" else []
        return ", ".join(notes)


COMPUTE_ONLY = Variant("compute", "compute")
REFERENCE = Variant("plain-mesh", "plain")
MEGATRON = Variant("megatron", "megatron")
COC = tuple(Variant(f"coc-{k}", "sliced", k) for k in _SLICES)
COC_FUSED = Variant("coc-fused", "kernel")
MC2 = Variant("mc2", "mc2")
FB_OVERLAP = Variant("commfuse-fb", "fb_overlap")


def direct(size: int, members_per_node: int) -> Schedule:
    """Transfers directly to every peer, those of the own node first if the group spans nodes."""
    if 1 < members_per_node < size:
        return Schedule("two_level", node_size=members_per_node)
    return Schedule("shifted")


def together(base: Schedule, size: int) -> list[Schedule]:
    """Schedules with collectives per chunk, where a launch would prefer them to batches."""
    shape = default_shape(size)
    return [Schedule(shape, 1)] if base.shape == "shifted" and shape != base.shape else []


def fused(
    schedule: Schedule,
    *,
    tuned: tuple[int, ...] = (),
    wgrad: Wgrad = "whole",
    sums: Sums = "ordered",
    collectives_from: int | None = None,
) -> Variant:
    """A variant of this project's ops.

    Args:
        schedule: with its number of lanes.
        tuned: numbers of chunks, in batches or collectives, from which each operation takes the
            fastest.
    """
    ways = tuple(replace(schedule, chunks=count) for count in tuned)
    if (schedule.lanes or 1) > 1 and schedule.shape == "shifted":
        ways += tuple(replace(way, shape="collective", lanes=1) for way in ways)
    how = "collective" if schedule.shape == "collective" else f"l{schedule.lanes}"
    name = f"commfuse-{'tuned' if tuned else f'c{schedule.chunks}'}-{how}"
    name += f"-t{schedule.taper:g}" * (schedule.taper != 1)
    name += "-wgrad" * (wgrad == "blocks") + "-once" * (sums == "once")
    way = ways[0] if ways else schedule
    return Variant(name, "fused", way, wgrad, sums, collectives_from, ways)


def variants(
    size: int,
    members_per_node: int,
    lanes: int,
    chunks: tuple[int, ...] = (1, 2, 4),
    collectives_from: int | None = None,
) -> list[Variant]:
    """All variants for a group, the reference first.

    Args:
        lanes: number of lanes for CommFuse; a variant with 2 lanes and 1 chunk is added.
        collectives_from: for CommFuse.
    """
    base = replace(direct(size, members_per_node), lanes=lanes)
    most = replace(base, chunks=chunks[-1])
    ours = partial(fused, collectives_from=collectives_from)
    choices = [
        REFERENCE,
        MEGATRON,
        *COC,
        *([COC_FUSED] if size == members_per_node == 8 else []),
        *([MC2] if size == members_per_node and size in RANKS else []),
        ours(replace(base, lanes=min(2, max(1, size - 1)))),
        *(ours(replace(base, chunks=k)) for k in chunks),
        *(ours(replace(schedule, chunks=k)) for schedule in together(base, size) for k in chunks),
        fused(base, tuned=chunks),
        fused(base, tuned=chunks, wgrad="blocks", sums="once"),
        ours(replace(base, chunks=6, taper=1.5)),
        ours(most, wgrad="blocks"),
        FB_OVERLAP,
    ]
    return list({variant.name: variant for variant in choices}.values())
