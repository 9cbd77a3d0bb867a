"""A full training step, composed of the layers that it repeats.

A layer's forward and backward are simulated event by event for one tensor-parallel group, which
represents all of them.  A stage is the sum of its layers, the pipeline follows from its
dependencies, and data-parallel buckets overlap with the layers.  A step of 4,096 NPUs therefore
costs hardly more to simulate than one of 8.

With ``--overlap-grad-reduce`` and ``--overlap-param-gather`` the gradients of a bucket (fp32) are
reduce-scattered during the backward of earlier layers, and its parameters (bf16) all-gathered
during the forward of earlier layers.  Buckets are transferred one at a time; the end of the
gradients and the start of the parameters remain exposed.  Reductions are free here: a collective
adds while it copies.

Not modeled, for lack of figures: transfers of different groups do not slow each other down where
they share links (between nodes they mostly do not), and switches do not block.

Results are cached by all their inputs, so that layouts, stages and variants share them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate import fb_overlap, llama
from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.group import collective_seconds, simulate
from commfuse_npu.tools.simulate.launches import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.pipeline import one_forward_one_backward, side_by_side
from commfuse_npu.tools.simulate.training import Kind, Training
from commfuse_npu.tools.simulate.variants import MEGATRON, Variant

_GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""


class LayerTime(NamedTuple):
    """Seconds of a layer.

    ``pair``: for forward-backward overlap, seconds of a layer in both directions as a pair, and the
    seconds that a stage needs once besides its layers.
    """

    forward: float
    backward: float
    pair: tuple[float, float] | None = None

    @property
    def alone(self) -> float:
        """Seconds of forward and backward one after the other."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward in the middle of a step."""
        return self.alone if self.pair is None else self.pair[0]


def _simulate(
    machine: Machine, shape: LayerShape, variant: Variant, build: Callable[..., None], *more: Any
) -> Simulated:
    """Simulate what ``build(rank, shape, *more)`` adds, as one of many in a row."""
    links = Links(machine, shape.ranks)
    return simulate(links, variant, lambda rank: build(rank, shape, *more), steady=True)


@lru_cache(1 << 14)
def _cost(machine: Machine, shape: LayerShape, variant: Variant, *build: Any) -> tuple[float, ...]:
    """Seconds of the device and of the host, of :func:`_simulate`."""
    figures = machine
    if not variant.tuned:
        # Launches are free, also of the transfers of other groups: the host's time is counted
        # separately.
        figures = replace(machine, launch_overhead=0.0, post_overhead=0.0, event_overhead=0.0)
    simulated = _simulate(figures, shape, variant, *build)
    return simulated.device, simulated.host(machine)


@lru_cache(1 << 14)
def _head(machine: Machine, shape: LayerShape, variant: Variant) -> list[float]:
    """Seconds of the output layer and the loss, forward and backward."""
    links, parts = Links(machine, shape.ranks), (llama.head_forward, llama.head_backward)
    return [simulate(links, variant, partial(part, shape=shape)).seconds for part in parts]


@dataclass(frozen=True)
class Step:
    """A training step on a machine.

    Raises:
        ValueError: a group does not fit the machine's nodes.
    """

    machine: Machine
    training: Training

    def parts(self, variant: Variant) -> list[Simulated]:
        """Simulate a layer's forward, then its backward; or one of each as a pair."""
        inputs = self.machine, self.training.shape, variant
        if variant.kind == "fb_overlap":
            return [_simulate(*inputs, fb_overlap.pair, 1, self.training.recomputes)]
        return [_simulate(*inputs, part) for part in (llama.forward, llama.backward)]

    def time(self, variant: Variant) -> float:
        """Seconds of a step."""
        training = self.training
        kinds = sorted({kind for place in training.places for kind in place} - {"none"})
        layers = {kind: self.layer_time(variant, kind) for kind in kinds}
        main = layers[kinds[-1]]

        def chunks(seconds: Callable[[LayerTime], float]) -> list[float]:
            return [
                sum(place[kind] * seconds(time) for kind, time in layers.items())
                for place in training.places
            ]

        forwards, backwards = chunks(lambda time: time.forward), chunks(lambda time: time.backward)
        for place, seconds in enumerate(forwards):
            backwards[place] += training.recomputed_share(place) * seconds
        head, embedding = _head(self.machine, training.shape, variant), self._embedding(variant)
        for passes, last in zip((forwards, backwards), head, strict=True):
            passes[-1] += last
            passes[0] += embedding
        pipeline = training.micro_batches, self._between_stages, training.vpp
        f, b = main.forward, main.backward
        if main.pair is None:
            ends = one_forward_one_backward(forwards, backwards, *pipeline)
        else:
            pairs = chunks(lambda time: time.seconds)
            # The part of a stage that occurs once, besides its layers.
            pairs = [pair + (main.pair[1] if pair else 0.0) for pair in pairs]
            pairs[-1] += sum(head)
            pairs[0] += 2 * embedding
            ends = side_by_side(forwards, backwards, pairs, *pipeline)
            f, b = (part * main.pair[0] / main.alone for part in (f, b))
        b *= 1 + training.recomputes
        buckets = [self._buckets(stage, f, b) for stage in range(training.layout.pp)]
        late = (time + tail for time, (tail, _) in zip(ends, buckets, strict=True))
        end = max(late) + buckets[0][1] + self._optimizer
        # A launch times a step each way, and keeps the faster one.
        return end if main.pair is None else min(end, self.time(MEGATRON))

    def layer_time(self, variant: Variant, kind: Kind = "dense") -> LayerTime:
        """A layer of one micro-batch, forward and backward, in the middle of a stage."""
        inputs = self.machine, self.training.shape_of(kind), variant
        if variant.kind == "fb_overlap":
            return self._paired(kind, *inputs)
        costs = [_cost(*inputs, part) for part in (llama.forward, llama.backward)]
        # The host does not wait between forward and backward, so their totals are compared.
        runs = 2 if self.training.recomputes else 1
        return LayerTime(*max(zip(*costs, strict=True), key=lambda of: runs * of[0] + of[1]))

    def _paired(self, kind: Kind, *inputs: Any) -> LayerTime:
        """Megatron's order for single layers; a pair from the difference of four and two layers."""
        alone, share = self.layer_time(MEGATRON, kind), self.training.recomputed_share(0)
        layer = extra = 0.0
        for recomputes, part in ((False, 1 - share), (True, share)):
            if not part:
                continue
            two, four = (_cost(*inputs, fb_overlap.pair, n, recomputes) for n in (2, 4))
            seconds = max(more - less for more, less in zip(four, two, strict=True)) / 2
            layer += part * seconds
            extra += part * max(0.0, two[0] - 2 * seconds)
        whole = alone.alone + share * alone.forward
        # A launch switches the overlap off if it is not faster.
        return alone._replace(pair=min((layer, extra), (whole, 0.0)))

    # ------------------------------------------------------------------- parts

    def _embedding(self, variant: Variant) -> float:
        """Seconds of the embedding, including the reduce-scatter of its rows (or a gather)."""
        shape = self.training.shape
        seconds = self.machine.memory(2.0 * shape.rows * shape.row_bytes)
        if variant.kind == "compute":
            return seconds
        links = Links(self.machine, shape.ranks)
        return seconds + collective_seconds(links, float(shape.block * shape.row_bytes))

    def _buckets(self, stage: int, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of the transfers of a stage's gradients and of its parameters.

        The embedding gets its gradients last and is needed first.  Not modeled: the sum of tied
        embedding gradients over the first and the last stage.
        """
        training, layout = self.training, self.training.layout
        table, first = [(training.table, 0.0, 0.0)], int(stage == 0)
        everyone, experts = table * first, list[Weights]()
        for kind, count in training.of_stage(stage).items():
            own, of_experts = training.parameters_of(kind)
            everyone += [(own, forward, backward)] * count
            experts += [(of_experts, forward, backward)] * count * bool(of_experts)
        everyone += table * (training.tables(stage) - first)
        tail = start = 0.0
        for layers, ranks, stride in (
            (everyone, layout.dp * layout.cp, layout.tp),
            (experts, training.expert_replicas, training.expert_stride),
        ):
            if ranks > 1 and layers:
                late, early = _exposed(training, layers, Links(self.machine, ranks, stride))
                tail, start = tail + late, start + early
        return tail, start

    @property
    def _between_stages(self) -> float:
        """Seconds to send a block of activations to the next stage."""
        layout, shape = self.training.layout, self.training.shape
        if layout.pp == 1:
            return 0.0
        level = Links(self.machine, 2, layout.npus // layout.pp).level(0, 1)
        return level.latency + shape.block * shape.row_bytes / level.rate

    @property
    def _optimizer(self) -> float:
        """Seconds of Adam.  Per parameter of this NPU's share it reads and writes 12 bytes of state
        (weight and two moments in fp32), reads the gradient and writes the bf16 weight."""
        training = self.training
        stages = map(training.parameters, range(training.layout.pp))
        parameters = max(training.with_states(*stage) for stage in stages)
        return self.machine.memory(parameters * (2 * 12 + _GRADIENT_BYTES + ITEM_BYTES))


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
    out = [collective_seconds(links, shard * _GRADIENT_BYTES) for shard in shards]
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
