"""A full training step, composed of the layers that it repeats.

Its chunks of layers are those of :mod:`.chunks`, the pipeline follows from its dependencies, and
data-parallel buckets overlap with the layers.  A step of 4,096 NPUs therefore costs hardly more to
simulate than one of 8.

With ``--overlap-grad-reduce`` and ``--overlap-param-gather`` the gradients of a bucket (fp32, or 16
bits with ``--fp16`` or ``--grad-reduce-in-bf16``) are reduce-scattered during the backward of
earlier layers, and its parameters (bf16) all-gathered during the forward of earlier layers.
Buckets are transferred one at a time; the end of the gradients and the start of the parameters
remain exposed.  Reductions are free here: a collective adds while it copies.

Not modeled, for lack of figures: transfers of different groups do not slow each other down where
they share links (between nodes they mostly do not), and switches do not block.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from commfuse_npu.tools.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.chunks import Chunks, ChunkTime
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import one_forward_one_backward, side_by_side
from commfuse_npu.tools.simulate.rank import collective_seconds, simulate
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, Variant


@lru_cache(1 << 14)
def _head(machine: Machine, shape: LayerShape, variant: Variant) -> list[float]:
    """Seconds of the output layer and the loss, forward and backward."""
    links = Links(machine, shape.ranks)
    return [
        simulate(links, variant, partial(part, shape=shape)).seconds
        for part in (llama.head_forward, llama.head_backward)
    ]


class StepParts(NamedTuple):
    """Seconds of a step.

    Attributes:
        computation: of the stage that computes most, with the optimizer.
        tp, cp, ep, dp, pp: what transfers of these groups, and how a form hides them, add to it.
        bubble: of the pipeline.
        host: what the step is longer with than on a host that launches for free.
    """

    computation: float
    tp: float
    cp: float
    ep: float
    dp: float
    pp: float
    bubble: float
    host: float


class TrainingStep(Chunks):
    """A training step on a machine."""

    def time(self, variant: Variant) -> float:
        """Seconds of a step."""
        seconds = self._seconds(variant)
        # A launch times steps each way, and keeps the faster one.
        return min(seconds, self.time(variant.alone)) if variant.alone else seconds

    def breakdown(self, variant: Variant) -> StepParts:
        """The parts of a step; their sum is its time.

        Each kind of transfers costs what the step is longer with them, on a host that launches for
        free, after those of the kinds before it are left out: DP, PP, EP, CP, TP.
        """
        if variant.alone and self.time(variant.alone) <= self._seconds(variant):
            return self.breakdown(variant.alone)
        training = self.training
        free = self.machine.launching_for_free
        steps = [self]
        groups = "dp", "pp", "ep", "cp"
        for number in range(len(groups) + 1):
            shape = replace(training.shape, free=groups[:number])
            steps.append(TrainingStep(free, replace(training, shape=shape)))
        alone = replace(COMPUTE_ONLY, leaves_out=variant.leaves_out or variant.kind == "passes")
        computes = steps[-1]
        seconds = [*(step._seconds(variant) for step in steps), computes._seconds(alone)]
        host, dp, pp, ep, cp, tp = (longer - shorter for longer, shorter in pairwise(seconds))
        work = [chunk.alone for chunk in computes._chunks(alone)]
        stages = training.layout.pp
        busiest = max(sum(work[stage::stages]) for stage in range(stages))
        computation = training.micro_batches * busiest + self._optimizer
        bubble = seconds[-1] - computation if stages > 1 else 0.0
        return StepParts(seconds[-1] - bubble, tp, cp, ep, dp, pp, bubble, host)

    def _seconds(self, variant: Variant) -> float:
        """Seconds of a step in this form."""
        training = self.training
        chunks = self._chunks(variant)
        forwards, backwards, _, pairs = zip(*chunks, strict=True)
        pipeline = training.micro_batches, self._between_stages, training.vpp
        *_, largest = training.by_shape(Counter(training.kinds))
        main = self.layer_time(variant.alone or variant, largest)
        f = main.forward
        b = main.backward * (1 + training.recomputes)
        if variant.pairs(training.layout):
            ends = side_by_side(forwards, backwards, pairs, *pipeline)
            f, b = (part * sum(pairs) / sum([*forwards, *backwards]) for part in (f, b))
        else:
            ends = one_forward_one_backward(forwards, backwards, *pipeline)
        if "dp" in training.shape.free:
            return max(ends) + self._optimizer
        buckets = [self._buckets(stage, f, b) for stage in range(training.layout.pp)]
        late = (time + tail for time, (tail, _) in zip(ends, buckets, strict=True))
        # The last micro-batch passes through all chunks.
        longer = sum(chunk.last - chunk.backward for chunk in chunks)
        return max(late) + longer + buckets[0][1] + self._optimizer

    def _chunks(self, variant: Variant) -> list[ChunkTime]:
        """The chunks, with what the host does before them, the embedding and the head."""
        training = self.training
        batch = self.machine.host(training.batch_launches, 0, 0)
        places = range(len(training.places))
        chunks = [self.chunk(variant, place).longer(batch, 0.0) for place in places]
        chunks[-1] = chunks[-1].longer(*_head(self.machine, training.shape, variant))
        embedding = self._embedding(variant)
        # A frozen one has no gradient.
        chunks[0] = chunks[0].longer(embedding, 0.0 if training.shape.lora else embedding)
        return chunks

    # ------------------------------------------------------------------- parts

    def _embedding(self, variant: Variant) -> float:
        """Seconds of the embedding, including the reduce-scatter of its rows (or a gather)."""
        shape = self.training.shape
        seconds = self.machine.memory(2.0 * shape.rows * shape.row_bytes)
        if variant.kind == "compute":
            return seconds
        links = Links(self.machine, shape.ranks)
        return seconds + collective_seconds(links, shape.block * shape.row_bytes)

    def _buckets(self, stage: int, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of the transfers of a stage's gradients and of its parameters.

        The embedding gets its gradients last and is needed first.  Not modeled: the sum of tied
        embedding gradients over the first and the last stage.
        """
        training = self.training
        layout = self.training.layout
        table = [] if training.shape.lora else [(training.table, 0.0, 0.0)]
        first = int(stage == 0)
        everyone = table * first
        experts = list[Weights]()
        for shape, count in training.of_stage(stage).items():
            own, of_experts = shape.parameters(trained=True)
            everyone += [(own, forward, backward)] * count
            experts += [(of_experts, forward, backward)] * count * bool(of_experts)
        everyone += table * (training.tables(stage) - first)
        groups = (
            (everyone, layout.dp * layout.cp, layout.tp),
            (experts, training.expert_replicas, training.expert_stride),
        )
        exposed = (
            _exposed(training, layers, Links(self.machine, ranks, stride))
            for layers, ranks, stride in groups
        )
        tail, start = map(sum, zip(*exposed, strict=True))
        return tail, start

    @property
    def _between_stages(self) -> float:
        """Seconds to send a block of activations to the next stage."""
        layout = self.training.layout
        shape = self.training.shape
        if layout.pp == 1 or "pp" in shape.free:
            return 0.0
        level = Links(self.machine, 2, layout.npus // layout.pp).level(0, 1)
        # A copy of the shape to the device and one back, and a post of both stages.
        shapes = self.machine.host(2, 2, 0) if self.training.shapes else 0.0
        return shapes + level.latency + shape.block * shape.row_bytes / level.rate

    @property
    def _optimizer(self) -> float:
        """Seconds of Adam.  Per parameter of this NPU's share it reads and writes 12 bytes of state
        (weight and two moments in fp32), reads the gradient and writes the bf16 weight."""
        training = self.training
        parameters = max(map(training.with_states, range(training.layout.pp)))
        return self.machine.memory(parameters * (2 * 12 + training.gradient_bytes + ITEM_BYTES))


# ------------------------------------------------------------------------ buckets


Weights = tuple[float, float, float]
"""A layer's parameters on one NPU, and its seconds forward and backward."""


def _exposed(training: Training, layers: Sequence[Weights], links: Links) -> tuple[float, float]:
    """Exposed seconds of the transfers of gradients and of parameters; layers from first to last.

    Transfers that do not overlap are fully exposed.  Without a distributed optimizer a rank keeps
    all sums instead of those of its shard: they are gathered after the backward.
    """
    order = buckets(layers, links.size)
    parameters, forward, backward = (
        [sum(layer[at] for layer in bucket) for bucket in order] for at in range(3)
    )
    shards = [math.ceil(numbers / links.size) for numbers in parameters]
    out = [collective_seconds(links, shard * training.gradient_bytes) for shard in shards]
    back = [collective_seconds(links, shard * ITEM_BYTES) for shard in shards]
    late = exposed_end(backward, out) if training.overlaps[0] else sum(out)
    if not training.distributed:
        return late + sum(out), 0.0
    return late, exposed_end(forward, back) if training.overlaps[1] else sum(back)


def buckets(layers: Sequence[Weights], ranks: int) -> list[list[Weights]]:
    """Layers by bucket, in backward order; Megatron's default size (core 0.12) closes one."""
    limit = max(40_000_000, 1_000_000 * ranks)
    groups: list[list[Weights]] = [[]]
    for layer in reversed(layers):
        groups[-1].append(layer)
        if sum(parameters for parameters, *_ in groups[-1]) >= limit:
            groups.append([])
    return [bucket for bucket in groups if bucket]


def exposed_end(work: Sequence[float], transfers: Sequence[float]) -> float:
    """Seconds from the end of the backward to the end of the last reduce-scatter.

    With time reversed, the same are the seconds that the first forward waits for parameters.

    Args:
        work, transfers: seconds of each bucket's layers in that direction, and of its transfer, in
            the order in which the buckets become ready.
    """
    time = link = 0.0
    for seconds, transfer in zip(work, transfers, strict=True):
        time += seconds
        link = max(link, time) + transfer
    return link - time
