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

from dataclasses import dataclass

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES
from commfuse_npu.plan.slots import in_flight_without, most_in_flight, slots
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.step import Shared, Step, Training
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["USABLE", "Footprint", "buffers", "communicators", "footprint", "limit"]

USABLE = 0.9
"""Share of the device memory that tensors may take; assumed: the rest is CANN's, and gaps."""

_GRADIENT, _ADAM = 4, 12
_STATISTICS = 2 * 8 * 4
_LOGITS = 2 + 4 + 4
"""Per logit: in bf16, in fp32 for the loss, and its gradient."""


@dataclass(frozen=True)
class Footprint:
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


def footprint(
    model: ModelConfig,
    training: Training,
    variant: Variant,
    hardware: Hardware,
    shared: Shared | None = None,
) -> Footprint:
    """What the fullest pipeline stage needs; ``shared``: see :class:`~.step.Step`."""
    stages = (_stage(model, training, stage, variant) for stage in range(len(training.layers)))
    weights, gradients, optimizer, activations = max(stages, key=sum)
    sizes = training.tp, training.cp, training.dp, len(training.layers)
    # One communicator of every kind of group, and the variant's lanes besides.
    groups = sum(size > 1 for size in sizes) * hardware.typical("host.communicator_bytes")
    step = Step(hardware.machine(), training, shared={} if shared is None else shared)
    lanes = communicators(variant, step, hardware) if variant.ours else 0.0
    communication = buffers(variant, step) + groups + lanes
    return Footprint(weights, gradients, optimizer, activations, communication)


def _stage(
    model: ModelConfig, training: Training, stage: int, variant: Variant
) -> tuple[float, float, float, float]:
    shape, stages = training.shape, len(training.layers)
    layers = training.layers[stage]
    table = training.vocabulary * training.hidden
    last = stage == stages - 1
    tables = (stage == 0) + (last and (model.untie_embeddings_and_output_weights or stages > 1))
    parameters = (layers * training.layer_parameters + tables * table) / training.tp
    rows = shape.rows / training.tp
    heads = model.num_attention_heads
    whole = rows * (
        ITEM_BYTES * (5 * shape.hidden + shape.qkv + 3 * shape.feed_forward) + _STATISTICS * heads
    )
    kept = whole if training.recompute == "none" else rows * ITEM_BYTES * shape.hidden
    layout = stages, stage, training.vpp, training.micro_batches
    if variant.kind == "turns":
        held = most_in_flight(slots(*layout)) / training.vpp
    else:
        held = in_flight_without(*layout) / training.vpp
    activations = held * layers * kept
    if training.recompute == "full":
        activations += whole
    if last:
        activations += _LOGITS * rows * shape.vocabulary
    shared = _ADAM / (training.dp * training.cp)
    return ITEM_BYTES * parameters, _GRADIENT * parameters, shared * parameters, activations


def buffers(variant: Variant, step: Step) -> float:
    """Bytes of gathered tensors, partial sums and scratch for a layer's transfers."""
    shape = step.training.shape
    if variant.schedule is not None:
        ran = step.programs(variant)
        wide = SUM_BYTES if variant.sums == "once" else ITEM_BYTES
        scratch = max(
            (
                ITEM_BYTES * program.scratch_elements() + wide * program.scratch_elements(wide=True)
                for program, _ in ran
            ),
            default=0,
        )
        return scratch + (_summed(shape) if ran and variant.wgrad == "blocks" else 0.0)
    if variant.kind == "compute" or shape.ranks == 1:
        return 0.0
    # Slices: and what the reordering copy writes.
    return (3.0 if variant.kind == "sliced" else 2.0) * shape.rows * shape.row_bytes


def _summed(shape: LayerShape) -> float:
    """Bytes of the largest weight gradient: by blocks it is summed in fp32."""
    widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // shape.ranks
    return float(SUM_BYTES * shape.hidden * widest)


def communicators(variant: Variant, step: Step, hardware: Hardware) -> float:
    """Bytes that HCCL allocates: one communicator for plain collectives, one per lane for programs.

    The lanes' two buffers are sized to their messages, from 16 MB to HCCL's own size
    (:func:`~commfuse_npu.runtime.hccl_options.lane_megabytes`).
    """
    whole = hardware.typical("host.communicator_bytes")

    def sized(message: float) -> float:
        return min(whole, 2 * 2.0**20 * lane_megabytes(message))

    if variant.kind in ("compute", "turns"):
        return 0.0
    if variant.schedule is None:
        return whole
    ran = step.programs(variant)
    return max((program.lanes * sized(message) for program, message in ran), default=0.0)
