"""The forms of a tensor-parallel layer, by the names that all commands print.

``no communication``
    the bound
``blocking collectives``
    all transfers of a collective at once.  **The reference** of a layer.
``Megatron's order``
    plain collectives; in the backward of a column-parallel layer the input is gathered during
    dgrad, and the sum of dgrad is scattered during wgrad
``CoC in K slices``
    as MindSpeed describes it: K slices of rows, a collective per slice on a separate stream,
    pipelined with the GEMMs; then a copy that restores the order of rows
``CoC's kernel``
    ``--coc-fused-kernel``, for 8 ranks of a node: each kernel hides a share of the shorter of GEMM
    and transfer, as others measured; Megatron's order in the backward of column-parallel layers
    (read in MindSpeed 26.1.0)
``MC2``
    ``--use-ascend-mc2`` (read in MindSpeed@028de58, which says that it is not for A3, but does not
    refuse it there): gathers before a GEMM and reduce-scatters after one are kernels in the best
    number of tiles (:mod:`commfuse_npu.tools.simulate.linear_layers`), for 2, 4 or 8 ranks of a
    full mesh, up to 32 on a ring, and inner dimensions of 256 to 65534, otherwise plain; Megatron's
    order in the backward of column-parallel layers
``fused layers``
    this project's ops as ``--use-commfuse`` launches them.  The second gather of a column-parallel
    layer's input starts before the weight gradient of the row-parallel layer after it.  If GEMMs
    hide its collectives anyway, a column-parallel layer's backward runs in Megatron's order
    (:mod:`commfuse_npu.tools.hardware.machine`); so do layers with few rows
``fused layers, tuned``
    the same with the fastest chunks for each operation, as batches or as collectives, or Megatron's
    order: what ``--commfuse-tuning on`` searches
``overlap``
    ``--commfuse-overlap``: passes take turns at their transfers
    (:mod:`commfuse_npu.tools.simulate.passes`): the forward of another micro-batch (in plain
    pipelines never), gradients, recomputation; weight gradients fill waits.  Lone forwards, and
    work outside of the layers, in Megatron's order
``overlap, more in flight``
    the same with ``--commfuse-overlap-memory``: a forward beside the gradients in plain pipelines,
    too
``overlap and fused layers``
    ``--commfuse-overlap`` with ``--use-commfuse``: lone forwards have fused layers where these are
    faster
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from commfuse_npu.plan import Schedule, default_chunks, default_shape, min_rows_to_fuse
from commfuse_npu.tools.hardware.machine import Machine, min_outputs_to_hide

if TYPE_CHECKING:
    from commfuse_npu.tools.simulate.training import Layout, Training

Kind = Literal["compute", "plain", "megatron", "sliced", "kernel", "mc2", "fused", "passes"]

Way = Schedule | int | None
"""How an operation is run: by a schedule, in a number of slices, or (``None``) by collectives in
Megatron's order."""

_CHUNKS = (1, 2, 3, 4, 6)
"""Numbers of chunks among which a launch with ``--commfuse-tuning on`` chooses."""


@dataclass(frozen=True)
class Variant:
    """One way to run a layer.

    Attributes:
        way: for all operations that ``chosen`` does not name.
        collectives_from: for ``fused``, number of outputs per rank from which the backward of
            column-parallel layers runs by collectives in Megatron's order.
        tuned: for ``fused``, the ways from which each operation takes its fastest.
        chosen: the ways of individual operations, by name.
        leaves_out: whether a recomputation leaves out the sum of fc2, which no gradient reads.
        beside: where a forward runs beside gradients: nowhere, except in plain pipelines, or
            everywhere.
        alone: for ``passes``, the form of a launch that switches them off, and of a forward with
            nothing beside it, where that is faster.
        flags: the options that launch it; none for Megatron's order.
        launched: whether a launch can have it.
    """

    name: str
    kind: Kind
    way: Way = None
    collectives_from: int | None = None
    tuned: tuple[Way, ...] = ()
    chosen: tuple[tuple[str, Way], ...] = ()
    leaves_out: bool = False
    beside: Literal["nowhere", "interleaved", "everywhere"] = "nowhere"
    alone: Variant | None = None
    flags: str = ""
    launched: bool = True

    @property
    def ours(self) -> bool:
        return "commfuse" in self.flags

    def pairs(self, layout: Layout) -> bool:
        """Whether forwards run beside the gradients of other micro-batches."""
        interleaved = layout.pp == 1 or layout.vpp > 1
        return self.beside == "everywhere" or (self.beside == "interleaved" and interleaved)


COMPUTE_ONLY = Variant("no communication", "compute", launched=False)
REFERENCE = Variant("blocking collectives", "plain", launched=False)
MEGATRON = Variant("Megatron's order", "megatron")
COC = tuple(
    Variant(f"CoC in {k} slices", "sliced", k, flags=f"--use-ascend-coc --coc-parallel-num {k}")
    for k in (2, 4, 8)
)
COC_FUSED = Variant("CoC's kernel", "kernel", flags="--use-ascend-coc --coc-fused-kernel")
MC2_RANKS = 2, 4, 8, 16, 32
"""Group sizes that it supports; a full mesh has up to 8 (``VALID_RANK``)."""
MC2 = Variant("MC2", "mc2", flags="--use-ascend-mc2")
OVERLAP = Variant(
    "overlap",
    "passes",
    beside="interleaved",
    alone=replace(MEGATRON, leaves_out=True, launched=False),
    flags="--commfuse-overlap",
)
OVERLAP_MEMORY = replace(
    OVERLAP,
    name="overlap, more in flight",
    beside="everywhere",
    flags="--commfuse-overlap --commfuse-overlap-memory",
)
FORMS = (MEGATRON, OVERLAP, OVERLAP_MEMORY, *COC, COC_FUSED, MC2)
"""The forms besides fused layers that can be launched.  Of a launch with the flags of several, the
last one is what runs."""
LEGEND = (
    "Overlap (`--commfuse-overlap`): passes of several micro-batches take turns at transfers. "
    "Fused layers (`--use-commfuse`): transfers of chunks beside GEMMs. CoC, MC2: MindSpeed's."
)
"""What the names of the forms stand for, below every table."""
FUSED = "fused layers"
BOTH = f"overlap and {FUSED}"


def fused(schedule: Schedule, collectives_from: int | None = None) -> Variant:
    """This project's ops; the schedule has its number of lanes."""
    return Variant(FUSED, "fused", schedule, collectives_from, flags="--use-commfuse")


def tuned(schedule: Schedule, chunks: Sequence[int] = _CHUNKS) -> Variant:
    """The same with the fastest number of chunks for each operation, in batches or collectives."""
    ways = [replace(schedule, chunks=count) for count in chunks]
    if (schedule.lanes or 1) > 1:
        ways += [replace(way, shape="collective", lanes=1) for way in ways]
    flags = "--use-commfuse --commfuse-tuning on"
    return Variant(f"{FUSED}, tuned", "fused", tuned=tuple(ways), flags=flags)


def forms(
    machine: Machine, training: Training, schedule: Schedule | None = None, least: int | None = None
) -> tuple[Variant, ...]:
    """The forms in which a training can run on a machine, and the bound.

    Without tensor or sequence parallelism only passes that take turns differ from Megatron's order.

    Args:
        schedule, least: of ``commfuse``, and rows of a block from which it fuses; by default those
            of a launch that says nothing.

    Raises:
        ValueError: the tensor-parallel group does not fit a node.
    """
    shape = training.shape
    tp = shape.ranks
    rows = shape.block
    if tp > machine.npus_per_node:
        raise ValueError(
            f"a tensor-parallel group of {tp} spans nodes of {machine.npus_per_node} NPUs; choose "
            f"at most {machine.npus_per_node}"
        )
    ways = [REFERENCE, MEGATRON]
    overlapped = [OVERLAP]
    if training.layout.pp > 1 and training.layout.vpp == 1:
        if training.recomputes_all:
            overlapped = [replace(OVERLAP, beside="everywhere")]
        else:
            overlapped.append(OVERLAP_MEMORY)
    if tp > 1 and shape.sequence_parallel:
        usual = schedule or Schedule(
            default_shape(tp), chunks=default_chunks(tp, rows, shape.hidden)
        )
        base, usual = (replace(way, lanes=way.lanes_for(tp)) for way in (Schedule(), usual))
        launched = fused(usual, collectives_from=min_outputs_to_hide(machine, tp))
        if rows < (min_rows_to_fuse(tp, shape.hidden) if least is None else least):
            launched = replace(MEGATRON, name=launched.name, flags=launched.flags)
        ways += COC
        if tp == 8:
            ways.append(COC_FUSED)
        if tp in MC2_RANKS:
            ways.append(MC2)
        ways += [launched, tuned(base)]
        if launched.kind == "fused":
            overlapped.append(
                replace(
                    overlapped[0],
                    name=BOTH,
                    alone=launched,
                    flags=f"{launched.flags} {OVERLAP.flags}",
                )
            )
    return (*ways, *overlapped, COMPUTE_ONLY)
