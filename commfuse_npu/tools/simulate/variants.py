"""The ways to run a tensor-parallel layer, by name.

=====================  ===========================================================================
``compute``            no communication at all: what everything is measured against
``plain-mesh``         every collective blocking, all its transfers at once.  **The reference.**
``megatron``           Megatron's order, with plain collectives: in the backward of a
                       column-parallel layer the input is gathered during dgrad, and the sum of
                       dgrad is scattered during wgrad
``coc-K``              what CoC does, as MindSpeed describes it: K slices of rows, a collective
                       per slice on a stream of its own, pipelined with the GEMMs; then a copy that
                       puts rows in order; ``coc-tuned``: the fastest K for each operation, which
                       MindSpeed does not offer
``coc-fused``          CoC as kernels (``--coc-fused-kernel``), for 8 ranks of a node: each hides
                       a share of the shorter of GEMM and transfer, which others measured;
                       Megatron's order in the backward of column-parallel layers (read in
                       MindSpeed 26.1.0)
``catccos``            the same with the kernels of hicann/catccos and their figures; no launch of
                       MindSpeed-LLM takes them yet
``mc2``                what ``--use-ascend-mc2`` does (read in MindSpeed@028de58, which says that it
                       is not for A3, and does not refuse it there): gathers before a GEMM and
                       reduce-scatters after one are kernels that cut by the host's formula
                       (:mod:`commfuse_npu.tools.simulate.mc2`), for 2, 4 or 8 ranks of a full mesh,
                       to 32 on a ring, and inner dimensions of 256 to 65534, else plain; Megatron's
                       order in the backward of column-parallel layers
``kernel-ideal``       a bound that nobody can launch: kernels without a cost of cutting; GEMM and
                       transfers overlap tile by tile, and one tile remains at one end; else as MC2
``commfuse-cK-lL``     this project's ops, K chunks per block, L lanes; ``commfuse-cK-collective``:
                       a chunk as one collective; ``-attention``: attention
                       is split by queries and pipelined with its output projection;
                       ``-tT``: a chunk is T times as long as the next to arrive; ``-wgrad``: the
                       weight gradient of a row-parallel layer per arriving block, which changes
                       its rounding; ``-once``: partial sums in one pass, rounded once (fp32), not
                       one after the other.  The input of a column-parallel layer is on its way
                       again before the weight gradient of the row-parallel one after it; where
                       GEMMs hide collectives anyhow its backward is in Megatron's order
                       (:mod:`commfuse_npu.hardware.machine`)
``commfuse-tuned-lL``  the same with the chunks, as batches or as collectives, that are fastest for
                       each operation, or Megatron's order, as ``--commfuse-tuning on`` looks for
                       them
``commfuse-fb``        ``--commfuse-fb-overlap``: forward and backward of two micro-batches take
                       turns (:mod:`commfuse_npu.tools.simulate.turns`); what has no partner, and
                       what is outside of the layers, in Megatron's order
=====================  ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from commfuse_npu.plan import Schedule, usual_shape
from commfuse_npu.plan.rules import Wgrad
from commfuse_npu.tools.simulate.mc2 import RANKS

__all__ = ["CATCCOS", "COC", "COC_FUSED", "COC_TUNED", "COMPUTE_ONLY", "IDEAL", "MC2", "MEGATRON",
           "REFERENCE", "TURNS", "Kind", "Role", "Sums", "Variant", "Way", "Wgrad", "direct",
           "fused", "together", "variants"]  # fmt: skip

Kind = Literal["compute", "plain", "megatron", "sliced", "kernel", "mc2", "ideal", "fused", "turns"]

Role = Literal["ours", "today", "rival", "bound", "plain"]

Sums = Literal["ordered", "once"]
"""How partial sums are added: one after the other, or all in one pass."""

Way = Schedule | int | None
"""How an operation is run: by a schedule, in so many slices, or by collectives in Megatron's order,
which is ``None``."""

_SLICES = (2, 4, 8)


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        way: of all operations that ``chosen`` does not name.
        attention: for ``fused``, whether attention is part of the operation.
        wgrad: for ``fused``, how weight gradients are made.
        sums: for ``fused``, how partial sums are added.
        collectives_from: for ``fused``, from how many outputs per rank the backward of
            column-parallel layers runs by collectives in Megatron's order.
        tuned: for ``fused`` and ``sliced``, the ways of which each operation takes its fastest.
        chosen: the ways of operations by name.
        kernel: for ``kernel``, the attribute of a machine that describes it.
    """

    name: str
    kind: Kind
    way: Way = None
    attention: bool = False
    wgrad: Wgrad = "whole"
    sums: Sums = "ordered"
    collectives_from: int | None = None
    tuned: tuple[Way, ...] = ()
    chosen: tuple[tuple[str, Way], ...] = ()
    kernel: str = ""

    @property
    def schedule(self) -> Schedule | None:
        return self.way if isinstance(self.way, Schedule) else None

    @property
    def role(self) -> Role:
        """What it is to somebody who chooses: this project's, what runs today, a rival, a bound.

        Nobody can launch a bound: an ideal kernel, catccos in MindSpeed-LLM, nor CoC with the
        fastest slices for each operation.
        """
        if self in (IDEAL, CATCCOS) or (self.kind == "sliced" and self.tuned):
            return "bound"
        roles: dict[Kind, Role] = {"fused": "ours", "turns": "ours", "megatron": "today"}
        rivals = self.kind in ("sliced", "kernel", "mc2")
        return roles.get(self.kind, "rival" if rivals else "plain")

    @property
    def ours(self) -> bool:
        return self.role == "ours"

    @property
    def other_rounding(self) -> str:
        """What is summed in another way than Megatron does; empty if it has Megatron's bits."""
        found = ["weight gradients are summed block by block"] if self.wgrad != "whole" else []
        found += ["partial sums are rounded once"] if self.sums == "once" else []
        return ", ".join(found)


COMPUTE_ONLY = Variant("compute", "compute")
REFERENCE = Variant("plain-mesh", "plain")
MEGATRON = Variant("megatron", "megatron")
COC = tuple(Variant(f"coc-{k}", "sliced", k) for k in _SLICES)
COC_TUNED = Variant("coc-tuned", "sliced", _SLICES[0], tuned=_SLICES)
COC_FUSED = Variant("coc-fused", "kernel", kernel="coc_fused")
CATCCOS = Variant("catccos", "kernel", kernel="catccos")
MC2 = Variant("mc2", "mc2")
TURNS = Variant("commfuse-fb", "turns")
IDEAL = Variant("kernel-ideal", "ideal")


def direct(size: int, members_per_node: int) -> Schedule:
    """Transfers straight to every peer, the own node first if the group spans nodes."""
    if 1 < members_per_node < size:
        return Schedule("two_level", node_size=members_per_node)
    return Schedule("shifted")


def together(base: Schedule, size: int) -> list[Schedule]:
    """Chunks as collectives, where a launch would take them in place of a schedule of batches."""
    shape = usual_shape(size)
    return [Schedule(shape, 1)] if base.shape == "shifted" and shape != base.shape else []


def fused(
    schedule: Schedule,
    *,
    tuned: tuple[int, ...] = (),
    attention: bool = False,
    wgrad: Wgrad = "whole",
    sums: Sums = "ordered",
    collectives_from: int | None = None,
) -> Variant:
    """This project's ops.

    Args:
        schedule: with its lanes.
        tuned: of so many chunks, in batches or collectives, each operation takes its fastest.
    """
    ways = tuple(replace(schedule, chunks=one) for one in tuned)
    if (schedule.lanes or 1) > 1 and schedule.shape == "shifted":
        ways += tuple(replace(one, shape="collective", lanes=1) for one in ways)
    how = "collective" if schedule.shape == "collective" else f"l{schedule.lanes}"
    name = f"commfuse-{'tuned' if tuned else f'c{schedule.chunks}'}-{how}"
    name += f"-t{schedule.taper:g}" * (schedule.taper != 1) + "-attention" * attention
    name += "-wgrad" * (wgrad == "blocks") + "-once" * (sums == "once")
    way = ways[0] if ways else schedule
    return Variant(name, "fused", way, attention, wgrad, sums, collectives_from, ways)


def variants(
    size: int,
    members_per_node: int,
    lanes: int,
    chunks: tuple[int, ...] = (1, 2, 4),
    collectives_from: int | None = None,
) -> list[Variant]:
    """All variants for a group, the reference first.

    Args:
        lanes: for CommFuse, what suits the links; 2 lanes and 1 chunk are there besides.
        collectives_from: for CommFuse.
    """
    base = replace(direct(size, members_per_node), lanes=lanes)
    most = replace(base, chunks=chunks[-1])
    ours = partial(fused, collectives_from=collectives_from)
    found = [
        REFERENCE,
        MEGATRON,
        *COC,
        COC_TUNED,
        *([COC_FUSED, CATCCOS] if size == members_per_node == 8 else []),
        *([MC2] if size == members_per_node and size in RANKS else []),
        IDEAL,
        ours(replace(base, lanes=min(2, max(1, size - 1)))),
        *(ours(replace(base, chunks=k)) for k in chunks),
        *(ours(replace(one, chunks=k)) for one in together(base, size) for k in chunks),
        fused(base, tuned=chunks),
        fused(base, tuned=chunks, wgrad="blocks", sums="once"),
        ours(replace(base, chunks=6, taper=1.5)),
        ours(most, wgrad="blocks"),
        ours(most, attention=True),
        ours(most, attention=True, wgrad="blocks"),
        TURNS,
    ]
    return list({variant.name: variant for variant in found}.values())
