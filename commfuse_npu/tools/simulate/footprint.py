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
stage of a pipeline holds as many micro-batches as there are stages from it to the end (1F1B).

Of the transfers the largest of a layer's operations counts, the backward of a column-parallel
linear: it holds the gathered input, and the gradient of all rows or what a pipeline holds of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commfuse_npu.plan import Plan
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.llama import SUM_BYTES, LayerShape
from commfuse_npu.tools.simulate.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.step import Training
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
    model: ModelConfig, training: Training, variant: Variant, hardware: Hardware
) -> Footprint:
    """What the fullest pipeline stage needs."""
    stages = (_stage(model, training, stage) for stage in range(len(training.layers)))
    weights, gradients, optimizer, activations = max(stages, key=sum)
    sizes = training.tp, training.cp, training.dp, len(training.layers)
    # One communicator of every kind of group, and the variant's lanes besides.
    groups = sum(size > 1 for size in sizes) * hardware.typical("host.communicator_bytes")
    lanes = communicators(variant, training.shape, hardware) if variant.schedule else 0.0
    communication = buffers(variant, training.shape) + groups + lanes
    return Footprint(weights, gradients, optimizer, activations, communication)


def _stage(model: ModelConfig, training: Training, stage: int) -> tuple[float, float, float, float]:
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
    under_way = min(stages - stage, training.micro_batches)
    activations = under_way * layers * kept
    if training.recompute == "full":
        activations += whole
    if last:
        activations += _LOGITS * rows * shape.vocabulary
    shared = _ADAM / (training.dp * training.cp)
    return ITEM_BYTES * parameters, _GRADIENT * parameters, shared * parameters, activations


def buffers(variant: Variant, shape: LayerShape) -> float:
    """Bytes of gathered tensors, partial sums and scratch for a layer's transfers."""
    if variant.kind == "compute" or shape.ranks == 1:
        return 0.0
    whole = float(shape.rows * shape.row_bytes)
    if variant.kind == "sliced":
        # And what the reordering copy writes.
        return 3 * whole
    if variant.schedule is None:
        return 2 * whole
    scattered = 2 * _scratch(variant.schedule.plan("reduce_scatter", 0, shape.ranks), shape)
    if variant.wgrad == "whole":
        return whole + scattered
    # The input is used as it arrives and never whole; the gradient is summed in fp32.
    widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // shape.ranks
    summed = SUM_BYTES * shape.hidden * widest
    return _scratch(variant.schedule.plan("gather", 0, shape.ranks), shape) + scattered + summed


def _scratch(plan: Plan, shape: LayerShape) -> float:
    rows = sum(plan.slot_rows(slot, shape.block) for slot in range(plan.window))
    return float(rows * shape.row_bytes)


def communicators(variant: Variant, shape: LayerShape, hardware: Hardware) -> float:
    """Bytes that HCCL allocates: one communicator for plain collectives, one per lane for plans.

    The lanes' two buffers are sized to their messages, from 16 MB to HCCL's own size
    (:func:`mindspeed_patches.hccl_buffer.message_megabytes`).
    """
    whole = hardware.typical("host.communicator_bytes")
    if variant.kind == "compute":
        return 0.0
    if variant.schedule is None:
        return whole
    message = math.ceil(shape.block * shape.row_bytes / variant.schedule.chunks / 2**20)
    sized = 2 * 2.0**20 * max(16, 1 << (message - 1).bit_length())
    return variant.schedule.lanes_for(shape.ranks) * min(whole, sized)
