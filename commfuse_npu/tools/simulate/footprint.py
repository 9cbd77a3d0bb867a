"""Device memory of a training step by purpose, to decide whether a layout fits.

Per parameter of an NPU: 2 bytes of weight (bf16), 4 of gradient (fp32; 2 with ``--fp16``), and 12
of Adam (master weight and two moments in fp32; 10 with ``--reuse-fp32-param``, whose master weights
keep only the bits that the bf16 weights lack), divided over the data-parallel ranks by Megatron's
distributed optimizer.  Activations per layer and micro-batch are what its backward needs, in bf16::

    rows / tp * 2 * (4 H       the inputs of both norms, qkv and fc1, split along the sequence
                     + QKV     queries, keys, values
                     + H       attention's result
                     + 3 F)    fc1's two halves and their product
    tokens * topk * 2 * (2 H         sent to experts and back
                     + etp * (H      their input
                     + 3 F / etp))   with experts, instead of the last line
    + rows / tp * heads * 64   row maxima and sums of flash attention, 8 fp32 each
                               (npu_fusion_attention keeps them so: read, not run)

With full recomputation a layer keeps only its input, and one layer at a time has all activations.
A pipeline stage holds as many micro-batches as there are stages from it to the end (1F1B), and more
with interleaved chunks.

For communication, the operation of a layer with the largest buffers counts: the backward of a
column-parallel linear layer, which holds the gathered input and the gradient of all rows.  A fused
one holds the partial sums of its peers besides.
"""

from __future__ import annotations

from typing import NamedTuple

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.slots import in_flight_without, most_in_flight, slots
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.training import Kind, Training
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["USABLE", "Footprint", "footprint", "limit"]

USABLE = 0.9
"""Share of the device memory for tensors; assumed: CANN and fragmentation take the rest."""

_ADAM, _ADAM_REUSED = 12, 10
_STATISTICS = 2 * 8 * 4
_LOGITS = 2 + 4
"""Bytes per logit: in bf16, and in fp32 for the loss; its gradient reuses that memory."""


class Footprint(NamedTuple):
    """Bytes on the NPU that needs the most.

    Attributes:
        communication: transfer buffers of a layer, and memory that communicators allocate.
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

    @property
    def first_step(self) -> float:
        """Peak tensor memory of the first step, which Megatron reports.

        Adam's moments are allocated at the end of the step, after its activations are freed.
        """
        master = self.optimizer * 4 / _ADAM
        state = self.weights + self.gradients
        return state + max(master + self.activations, self.optimizer)


def limit(hardware: Hardware) -> float:
    """Bytes of device memory that a step may use."""
    return USABLE * hardware.typical("npu.hbm_bytes")


def footprint(training: Training, variant: Variant, hardware: Hardware) -> Footprint:
    """The memory of the pipeline stage that needs the most."""
    layout, shape = training.layout, training.shape
    stages = (_stage(training, stage, variant) for stage in range(layout.pp))
    # One communicator per kind of group, and the lanes of the variant.
    most = hardware.typical("host.communicator_bytes")
    groups = sum(size > 1 for size in layout[:4]) * most
    communication = _buffers(variant, shape) + groups + _lanes(variant, shape, most)
    return Footprint(*max(stages, key=sum), communication)


def _stage(training: Training, stage: int, variant: Variant) -> tuple[float, float, float, float]:
    shape, layout, model = training.shape, training.layout, training.model
    last = stage == layout.pp - 1
    tables = (stage == 0) + (last and (model.untie_embeddings_and_output_weights or layout.pp > 1))
    layers, (everyone, experts) = training.of_stage(stage), training.of_layers(stage)
    everyone += tables * shape.vocabulary * shape.hidden / layout.tp
    order = layout.pp, stage, layout.vpp, training.micro_batches
    if variant.kind == "fb_overlap":
        held = most_in_flight(slots(*order)) / layout.vpp
    else:
        held = in_flight_without(*order) / layout.vpp
    whole = {kind: _kept(training, kind) for kind in layers}
    recomputed = training.recomputed_share(stage)
    inputs = recomputed * ITEM_BYTES * shape.held * shape.hidden
    activations = held * sum(
        count * (inputs + (1 - recomputed) * whole[kind])
        for kind, count in layers.items()
        if whole[kind]
    )
    if training.recomputes:
        activations += max(whole.values())
    if last:
        activations += _LOGITS * shape.rows / layout.tp * shape.vocabulary
    parameters, shared = everyone + experts, training.with_states(everyone, experts)
    adam = _ADAM_REUSED if training.reuses else _ADAM
    gradients = training.gradient_bytes * parameters
    return ITEM_BYTES * parameters, gradients, adam * shared, activations


def _kept(training: Training, kind: Kind) -> float:
    """Bytes of activations that a layer keeps for one micro-batch."""
    if kind == "none":
        return 0.0
    shape, heads = training.shape_of(kind), training.model.num_attention_heads
    rows = shape.rows / shape.ranks
    split = shape.inner * shape.ranks + shape.qkv + (shape.halves + 1) * shape.dense * shape.ranks
    if shape.latent is not None:
        split += shape.latent.kept(shape.ranks)
    size = shape.held * 4 * shape.hidden + rows * split
    if experts := shape.experts:
        sent = shape.held * experts.each
        size += sent * ((2 + experts.tensor) * shape.hidden + (experts.halves + 1) * experts.width)
    return ITEM_BYTES * size + rows * _STATISTICS * heads


def _buffers(variant: Variant, shape: LayerShape) -> float:
    """Bytes of gathered tensors, partial sums and scratch for the transfers of a layer."""
    if variant.kind == "compute" or shape.ranks == 1:
        return 0.0
    gathered = float(shape.rows * shape.row_bytes)
    widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // shape.ranks
    if variant.kind == "fused":
        size = 3 * gathered
        if any(way.shape == "collective" and way.chunks > 1 for way in _schedules(variant)):
            # The rows of a chunk's product are copied to their places.
            size = max(size, gathered + ITEM_BYTES * shape.rows * widest)
        # By blocks, the largest weight gradient is accumulated in fp32.
        return size + variant.rounded * SUM_BYTES * shape.hidden * widest
    # Sliced variants need one more buffer, for the copy that restores the order of rows.
    return (3.0 if variant.kind == "sliced" else 2.0) * gathered


def _lanes(variant: Variant, shape: LayerShape, most: float) -> float:
    """Bytes of the lanes' communicators: two buffers each, from 16 MB to HCCL's own size."""
    if variant.kind != "fused" or shape.ranks == 1:
        return 0.0
    block = shape.block * shape.row_bytes
    return max(
        way.lanes_for(shape.ranks)
        * min(most, 2 * 2.0**20 * lane_megabytes(block * way.blocks_at_once(shape.ranks)))
        for way in _schedules(variant)
    )


def _schedules(variant: Variant) -> list[Schedule]:
    return [way for way in variant.tuned or (variant.way,) if isinstance(way, Schedule)]
