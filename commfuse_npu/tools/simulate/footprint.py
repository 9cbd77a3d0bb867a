"""Device memory of a training step by purpose, to decide whether a layout fits.

Per parameter of an NPU: 2 bytes of weight (bf16), 4 of gradient (fp32; 2 with ``--fp16`` or
``--grad-reduce-in-bf16``), and 12 of Adam (master weight and two moments in fp32; 10 with
``--reuse-fp32-param``, whose master weights keep only the bits that the bf16 weights lack), divided
over the data-parallel ranks by Megatron's distributed optimizer.  With LoRA only adapters have
gradients and optimizer states; their narrow activations are not counted.  Activations per layer and
micro-batch are what its backward needs, in bf16::

    rows / tp * 2 * (4 H       the inputs of both norms, qkv and fc1, split along the sequence
                     + QKV     queries, keys, values
                     + H       attention's result
                     + 3 F)    fc1's two halves and their product
    tokens * topk * 2 * (2 H         sent to experts and back
                     + etp * (H      their input
                     + 3 F / etp))   with experts, instead of the last line
    + rows / tp * heads * 64   row maxima and sums of flash attention, 8 fp32 each
                               (npu_fusion_attention keeps them so: read, not run)

With full recomputation a layer keeps only its input, and one layer at a time has all activations;
two of them where passes take turns, whose waiting weight gradients need their operands, too.  A
pipeline stage holds as many micro-batches as there are stages from it to the end (1F1B), and more
with interleaved chunks.

For communication, the operation of a layer with the largest buffers counts: the backward of a
column-parallel linear layer, which holds the gathered input and the gradient of all rows.  A fused
one holds the partial sums of its peers besides.
"""

from typing import NamedTuple

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.slots import in_flight_without, most_in_flight, slots
from commfuse_npu.plan.turn_rule import MOST_WEIGHT_GRADIENTS
from commfuse_npu.runtime.hccl_options import lane_megabytes
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import Variant

USABLE = 0.9
"""Share of the device memory for tensors; assumed: CANN and fragmentation take the rest."""

_ADAM = 12
_ADAM_REUSED = 10
_QUANTIZED = 4.127 / 8
"""Bytes of a 4-bit weight with its constants (QLoRA, arXiv 2305.14314, section 3)."""
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
        return sum(self)

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
    stages = (_stage(training, stage, variant) for stage in range(training.layout.pp))
    # One communicator per kind of group, and what the variant needs.
    most = hardware.typical("host.communicator_bytes")
    communication = sum(size > 1 for size in training.layout[:4]) * most
    if variant.kind != "compute" and training.shape.ranks > 1:
        communication += _transfers(variant, training.shape, most)
    return Footprint(*max(stages, key=sum), communication)


def _stage(training: Training, stage: int, variant: Variant) -> tuple[float, float, float, float]:
    shape = training.shape
    layout = training.layout
    parameters = sum(training.parameters(stage))
    trained = training.parameters(stage, trained=True)
    order = layout.pp, stage, layout.vpp, training.micro_batches
    held = most_in_flight(slots(*order)) if variant.pairs(layout) else in_flight_without(*order)
    layers = training.of_stage(stage)
    kept = {layer: _kept(layer, training.model.num_attention_heads) for layer in layers}
    chunks = range(stage, len(training.places), layout.pp)
    recomputed = sum(map(training.recomputed_layers, chunks)) / max(1, training.layers[stage])
    inputs = recomputed * ITEM_BYTES * shape.held * shape.hidden
    activations = (held / layout.vpp) * sum(
        count * (inputs + (1 - recomputed) * kept[layer]) for layer, count in layers.items()
    )
    in_turns = variant.kind == "passes"
    if training.recomputes:
        ahead = in_turns and training.recomputed_layers(stage) > 1
        activations += (2 if ahead else 1) * max(kept.values(), default=0.0)
    if in_turns and not shape.lora:
        activations += max(map(_waiting, layers), default=0.0)
    if stage == layout.pp - 1:
        activations += _LOGITS * shape.rows / layout.tp * shape.vocabulary
    weights = ITEM_BYTES * parameters
    if shape.lora:
        weights += ITEM_BYTES * sum(trained)
        if shape.lora.quantized:
            linear = parameters - training.tables(stage) * training.table
            weights -= (ITEM_BYTES - _QUANTIZED) * linear
    adam = _ADAM_REUSED if training.reuses else _ADAM
    gradients = training.gradient_bytes * sum(trained)
    return weights, gradients, adam * training.with_states(stage), activations


def _kept(shape: LayerShape, heads: int) -> float:
    """Bytes of activations that a layer keeps for one micro-batch."""
    rows = shape.rows / shape.ranks
    tp = shape.ranks
    split = shape.inner * tp + shape.qkv + (shape.halves + 1) * shape.dense * tp
    if shape.latent:
        split += shape.latent.kept(tp)
    size = shape.held * 4 * shape.hidden + rows * split
    if experts := shape.experts:
        sent = shape.held * experts.each
        size += sent * ((2 + experts.tensor) * shape.hidden + (experts.halves + 1) * experts.width)
    return ITEM_BYTES * size + rows * _STATISTICS * heads


def _waiting(shape: LayerShape) -> float:
    """Bytes of the most operands of weight gradients that wait: inputs and output gradients."""
    operands = [max(rows) * (inputs + outputs) for _, inputs, outputs, rows, *_ in shape.weights]
    if shape.latent:
        qkv = shape.qkv + shape.latent.kept(shape.ranks)
        operands[0] = shape.rows * (shape.hidden + qkv // shape.ranks)
    return ITEM_BYTES * sum(sorted(operands)[-MOST_WEIGHT_GRADIENTS:])


def _transfers(variant: Variant, shape: LayerShape, most: float) -> float:
    """Bytes of gathered tensors, partial sums, scratch and lanes for the transfers of a layer.

    A lane is a communicator with two buffers, each from 16 MB to ``most``, HCCL's own size.
    """
    gathered = shape.rows * shape.row_bytes
    tp = shape.ranks
    if variant.kind != "fused":
        # Sliced variants need one more buffer, for the copy that restores the order of rows.
        return (3.0 if variant.kind == "sliced" else 2.0) * gathered
    widest = max(2 * shape.feed_forward, shape.qkv, shape.vocabulary) // tp
    ways = [way for way in variant.tuned or (variant.way,) if isinstance(way, Schedule)]
    size = 3 * gathered
    block = shape.block * shape.row_bytes
    if any(way.shape == "collective" and way.chunks > 1 for way in ways):
        # The rows of a chunk's product are copied to their places.
        size = max(size, gathered + ITEM_BYTES * shape.rows * widest)
    messages = ((way, lane_megabytes(block * way.blocks_at_once(tp))) for way in ways)
    return size + max(way.lanes_for(tp) * min(most, 2 * 2.0**20 * mb) for way, mb in messages)
