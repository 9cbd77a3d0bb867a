"""Device memory of a training step, by what it is for: does a layout fit?

Per parameter of an NPU: 2 bytes of weight (bf16), 4 of gradient (fp32), and 12 of Adam (master
weight and two moments in fp32) divided over the data-parallel ranks, as Megatron's distributed
optimizer does.  Activations per layer and micro-batch are what its backward needs, in bf16::

    rows / tp * 2 * (4 H       the inputs of both norms, qkv and fc1, split along the sequence
                     + QKV     queries, keys, values
                     + H       attention's result
                     + 3 F)    fc1's two halves and their product
    + rows / tp * heads * 64   row maxima and sums of flash attention, 8 fp32 each
                               (npu_fusion_attention keeps them so: read, not run)

With full recomputation a layer keeps its input only, and one layer at a time has all of it.  A
stage of a pipeline holds as many micro-batches as there are stages from it to the end (1F1B), and
more of them where chunks are interleaved.

Of the transfers the largest of a layer's operations counts.  Of a fused one it is the scratch
memory of its program; of others the backward of a column-parallel linear, which holds the gathered
input and the gradient of all rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES, Machine
from commfuse_npu.plan.slots import in_flight_without, most_in_flight, slots
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Ran
from commfuse_npu.tools.simulate.step import Training
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["USABLE", "Footprint", "footprint", "limit"]

USABLE = 0.9
"""Share of the device memory that tensors may take; assumed: the rest is CANN's, and gaps."""

_GRADIENT, _ADAM = 4, 12
_STATISTICS = 2 * 8 * 4
_LOGITS = 2 + 4 + 4
"""Per logit: in bf16, in fp32 for the loss, and its gradient."""


class Footprint(NamedTuple):
    """Bytes on the fullest NPU.

    Attributes:
        communication: buffers of a layer's transfers, and what communicators allocate.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    communication: float

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.communication


def limit(hardware: Hardware) -> float:
    """Bytes that a step may take."""
    return USABLE * hardware.typical("npu.hbm_bytes")


def footprint(training: Training, variant: Variant, hardware: Hardware) -> Footprint:
    """What the fullest pipeline stage needs."""
    layout, machine = training.layout, hardware.machine()
    stages = (_stage(training, stage, variant) for stage in range(layout.pp))
    ran: tuple[Ran, ...] = ()
    if variant.kind == "fused":
        ran = _programs(machine, training.shape, training.context, variant)
    # One communicator of every kind of group, and the variant's lanes besides, whose two buffers
    # are sized to their messages, from 16 MB to HCCL's own size.
    most = hardware.typical("host.communicator_bytes")
    groups = sum(size > 1 for size in layout[:4]) * most
    lanes = (
        one.program.lanes * min(most, 2 * 2.0**20 * lane_megabytes(one.message)) for one in ran
    )
    communication = _buffers(variant, training.shape, ran) + groups + max(lanes, default=0.0)
    return Footprint(*max(stages, key=sum), communication)


def _stage(training: Training, stage: int, variant: Variant) -> tuple[float, float, float, float]:
    shape, layout, model = training.shape, training.layout, training.model
    layers, last = training.layers[stage], stage == layout.pp - 1
    table = shape.vocabulary * shape.hidden
    tables = (stage == 0) + (last and (model.untie_embeddings_and_output_weights or layout.pp > 1))
    parameters = (layers * model.layer_parameters + tables * table) / layout.tp
    rows = shape.rows / layout.tp
    heads = model.num_attention_heads
    whole = rows * (
        ITEM_BYTES * (5 * shape.hidden + shape.qkv + 3 * shape.feed_forward) + _STATISTICS * heads
    )
    kept = rows * ITEM_BYTES * shape.hidden if training.again else whole
    order = layout.pp, stage, layout.vpp, training.micro_batches
    if variant.kind == "turns":
        held = most_in_flight(slots(*order)) / layout.vpp
    else:
        held = in_flight_without(*order) / layout.vpp
    activations = held * layers * kept
    if training.again:
        activations += whole
    if last:
        activations += _LOGITS * rows * shape.vocabulary
    shared = _ADAM / (layout.dp * layout.cp)
    return ITEM_BYTES * parameters, _GRADIENT * parameters, shared * parameters, activations


def _buffers(variant: Variant, shape: LayerShape, ran: tuple[Ran, ...]) -> float:
    """Bytes of gathered tensors, partial sums and scratch for a layer's transfers."""
    if variant.kind == "fused":
        wide = SUM_BYTES if variant.sums == "once" else ITEM_BYTES
        scratch = (
            ITEM_BYTES * one.program.scratch_elements()
            + wide * one.program.scratch_elements(wide=True)
            for one in ran
        )
        most = max(scratch, default=0)
        if not ran or variant.wgrad != "blocks":
            return most
        # The largest weight gradient is summed in fp32.
        widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // shape.ranks
        return most + float(SUM_BYTES * shape.hidden * widest)
    if variant.kind == "compute" or shape.ranks == 1:
        return 0.0
    # Slices: and what the reordering copy writes.
    return (3.0 if variant.kind == "sliced" else 2.0) * shape.rows * shape.row_bytes


@lru_cache(4096)
def _programs(
    machine: Machine, shape: LayerShape, context: ContextParallel | None, variant: Variant
) -> tuple[Ran, ...]:
    """What a rank runs of a layer and of the head, with every schedule that is tried."""
    found: list[Ran] = []
    group = Group(machine, shape.ranks)
    for one in [variant.with_way(way) for way in variant.tuned] or [variant]:
        forward, backward = (context and context.attended(machine, one)) or (None, None)
        for build in (
            lambda rank, attended=forward: llama.forward(rank, shape, attended),
            lambda rank, attended=backward: llama.backward(rank, shape, attended),
            lambda rank: llama.head_forward(rank, shape),
            lambda rank: llama.head_backward(rank, shape),
        ):
            found += group.build(one, build, 0).ran.values()
        if context and context.fuses:
            exchanges, ulysses = context.exchanges(machine, one.schedule)
            for part in (ulysses.forward, ulysses.backward):
                found += context.group(machine).build(exchanges, part, 0).ran.values()
    return tuple(found)
