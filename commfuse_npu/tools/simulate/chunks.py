"""Times of a layer, and of the chunk of layers that a pipeline stage runs for a micro-batch.

They are simulated event by event for one tensor-parallel group, which represents all of them.
Results are cached by all their inputs, so that layouts, stages and variants share them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

from commfuse_npu.hardware.machine import Machine
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.group import simulate
from commfuse_npu.tools.simulate.launches import Links
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.training import Kind, Training
from commfuse_npu.tools.simulate.variants import FB_OVERLAP, Variant

KINDS: tuple[Kind, ...] = ("none", "dense", "experts")
"""In the order of a model."""
_MANY = 8
"""Equal layers that take turns and are simulated; each more takes as long as one of the last
four."""

_Cost = tuple[float, float]
"""Seconds of the device and of the host, either of which can be the limit."""


class LayerTime(NamedTuple):
    """Seconds of a layer's forward, its backward, and its recomputation."""

    forward: float
    backward: float
    recomputation: float

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


class ChunkTime(NamedTuple):
    """Seconds of a chunk for one micro-batch.

    Attributes:
        forward: by itself.
        backward: by itself, with the recomputation.
        last: of the step's last backward, whose weight gradients do not wait where their buckets
            are reduced during it.
        pair: of the backward, and the forward of another micro-batch beside it; ``None`` if there
            never is one.
    """

    forward: float
    backward: float
    last: float
    pair: float | None = None


@dataclass(frozen=True)
class Chunks:
    """The chunks of a training on a machine.

    Raises:
        ValueError: a group does not fit the machine's nodes.
    """

    machine: Machine
    training: Training

    def parts(self, variant: Variant) -> list[Simulated]:
        """Simulate a layer's forward, then its backward; or one of each side by side."""
        shape = self.training.shape
        inputs = self.machine, shape.ranks, variant
        if variant.kind == "passes":
            layer = Layers(shape, 1, self.training.recomputes)
            return [_simulate(*inputs, take_turns, (layer,), True, True)]
        return [_simulate(*inputs, part, shape) for part in (llama.forward, llama.backward)]

    def layer_time(self, variant: Variant, kind: Kind = "dense") -> LayerTime:
        """A layer of one micro-batch in order, in the middle of a stage."""
        shape = self.training.shape_of(kind)
        again = llama.recomputation if variant.leaves_out else llama.forward
        costs = [
            _cost(self.machine, shape.ranks, variant, part, shape)
            for part in (llama.forward, llama.backward, again)
        ]
        # The host does not wait between the passes, so their totals are compared.
        runs = 1, 1, self.training.recomputes
        return LayerTime(*max(zip(*costs, strict=True), key=lambda of: sum(map(mul, runs, of))))

    def layer_in_turns(self) -> float:
        """Seconds of a dense layer in the middle of a stage, forward beside backward."""
        layers = Layers(self.training.shape_of("dense"), _MANY, self.training.recomputes)
        fewer = layers._replace(number=_MANY // 2)
        costs = (_in_turns(self.machine, (run,), True, True) for run in (layers, fewer))
        return max(many - half for many, half in zip(*costs, strict=True)) / (_MANY // 2)

    def of_layers(self, variant: Variant) -> float:
        """Seconds of the layers of a step without a pipeline."""
        chunk, batches = self.chunk(variant, 0), self.training.micro_batches
        alone = chunk.forward + chunk.backward
        between = alone if chunk.pair is None else chunk.pair
        seconds = alone + (batches - 1) * between
        return seconds if variant.alone is None else min(seconds, self.of_layers(variant.alone))

    def chunk(self, variant: Variant, place: int) -> ChunkTime:
        """A chunk, by its place in the model."""
        if variant.alone is None:
            return self._in_order(variant, place)
        layout, training = self.training.layout, self.training
        recomputed = training.recomputed_share(place) * training.places[place].total()
        whole = math.floor(recomputed)

        def cost(*passes: Any) -> _Cost:
            """Between whole numbers of recomputed layers."""
            less, more = (
                _in_turns(self.machine, self._layers(place, number), *passes)
                for number in (whole, math.ceil(recomputed))
            )
            device, host = (
                a + (recomputed - whole) * (b - a) for a, b in zip(less, more, strict=True)
            )
            return device, host

        # The host does not wait between the passes, so their totals are compared.
        forward, backward = max(zip(cost(True, False), cost(False, True), strict=True), key=sum)
        reduces = training.overlaps[0] and layout.dp * layout.cp > 1
        last = max(cost(False, True, 0)) if reduces else backward
        in_order = self._in_order(variant.alone, place)
        return ChunkTime(
            min(forward, in_order.forward),
            min(backward, in_order.backward),
            min(last, in_order.last),
            max(cost(True, True)) if variant.pairs(layout) else None,
        )

    def _in_order(self, variant: Variant, place: int) -> ChunkTime:
        training = self.training
        again = training.recomputed_share(place)
        forward = backward = 0.0
        for kind in KINDS[1:]:
            if count := training.places[place][kind]:
                time = self.layer_time(variant, kind)
                forward += count * time.forward
                backward += count * (time.backward + again * time.recomputation)
        return ChunkTime(forward, backward, backward)

    def _layers(self, place: int, recomputed: int) -> tuple[Layers, ...]:
        """The layers of a chunk, of which the first ones are recomputed."""
        layers = []
        for kind in KINDS[1:]:
            count, shape = self.training.places[place][kind], self.training.shape_of(kind)
            first = min(recomputed, count)
            recomputed -= first
            layers += [Layers(shape, first, True), Layers(shape, count - first)]
        return tuple(run for run in layers if run.number)


def _in_turns(machine: Machine, chunk: tuple[Layers, ...], *passes: Any) -> _Cost:
    """The cost of :func:`take_turns`, with its further arguments."""
    if not chunk:
        return 0.0, 0.0
    longest = max(chunk, key=lambda layers: layers.number)
    if longest.number <= _MANY:
        ranks = longest.shape.ranks
        return _cost(machine, ranks, FB_OVERLAP, take_turns, chunk, *passes)
    at = chunk.index(longest)

    def of(number: int) -> _Cost:
        fewer = longest._replace(number=number)
        return _in_turns(machine, (*chunk[:at], fewer, *chunk[at + 1 :]), *passes)

    halves = (longest.number - _MANY) / (_MANY // 2)
    device, host = (
        many + halves * (many - half) for many, half in zip(of(_MANY), of(_MANY // 2), strict=True)
    )
    return device, host


def _simulate(
    machine: Machine, ranks: int, variant: Variant, build: Callable[..., None], *more: Any
) -> Simulated:
    """Simulate what ``build(rank, *more)`` adds, as one of many in a row."""
    links = Links(machine, ranks)
    return simulate(links, variant, lambda rank: build(rank, *more), steady=True)


@lru_cache(1 << 14)
def _cost(machine: Machine, ranks: int, variant: Variant, *build: Any) -> _Cost:
    figures = machine
    if not variant.tuned:
        # Launches are free, also of the transfers of other groups: the host's time is counted
        # separately.
        figures = replace(machine, launch_overhead=0.0, post_overhead=0.0, event_overhead=0.0)
    simulated = _simulate(figures, ranks, variant, *build)
    return simulated.device, simulated.host(machine)
