"""Times of a layer, and of the chunk of layers that a pipeline stage runs for a micro-batch.

They are simulated event by event for one tensor-parallel group, which represents all of them.
Results are cached by all their inputs, so that layouts, stages and variants share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import mul
from typing import Any, NamedTuple

from commfuse_npu.tools.hardware.machine import Machine
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import Links, Simulated
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.rank import simulate
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import OVERLAP, Variant

_MOST = 8
_FEW = 2
"""Most equal layers in turns that are simulated; each more takes as long as those beyond a few.
Passes that hand over at different numbers of places meet in the same way again after some layers,
mostly six."""

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

    @property
    def alone(self) -> float:
        """Seconds of a micro-batch by itself."""
        return self.forward + self.backward

    def longer(self, forward: float, backward: float) -> ChunkTime:
        """The same with more work, in seconds."""
        pair = None if self.pair is None else self.pair + forward + backward
        last = self.last + backward
        return ChunkTime(self.forward + forward, self.backward + backward, last, pair)

    @property
    def repeated(self) -> float:
        """Seconds of a forward and a backward in the middle of a step."""
        return self.alone if self.pair is None else self.pair


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

    def layer_time(self, variant: Variant, shape: LayerShape | None = None) -> LayerTime:
        """A layer of one micro-batch in order, in the middle of a stage; by default a dense one."""
        shape = shape or self.training.shape_of("dense")
        again = llama.recomputation if variant.leaves_out else llama.forward
        costs = [
            _cost(self.machine, shape.ranks, variant, part, shape)
            for part in (llama.forward, llama.backward, again)
        ]
        # The host does not wait between the passes, so their totals are compared.
        runs = 1, 1, self.training.recomputes
        return LayerTime(*max(zip(*costs, strict=True), key=lambda of: sum(map(mul, runs, of))))

    def layers(self, variant: Variant) -> float:
        """Seconds of a step's layers, without a pipeline."""
        chunk = self.chunk(variant, 0)
        seconds = chunk.alone + (self.training.micro_batches - 1) * chunk.repeated
        return min(seconds, self.layers(variant.alone)) if variant.alone else seconds

    def chunk(self, variant: Variant, place: int) -> ChunkTime:
        """A chunk, by its place in the model."""
        if not variant.alone:
            return self._in_order(variant, place)
        training = self.training
        layout = self.training.layout
        cost = partial(_in_turns, self.machine, self._layers(place))
        # The host does not wait between the passes, so their totals are compared.
        forward, backward = max(zip(cost(True, False), cost(False, True), strict=True), key=sum)
        reduces = training.overlaps[0] and layout.dp * layout.cp > 1
        last = max(cost(False, True, 0)) if reduces else backward
        forward = min(forward, self._in_order(variant.alone, place).forward)
        pair = max(cost(True, True)) if variant.pairs(layout) else None
        return ChunkTime(forward, backward, last, pair)

    def _in_order(self, variant: Variant, place: int) -> ChunkTime:
        training = self.training
        kinds = training.places[place]
        again = training.recomputed_layers(place) / max(1, kinds.total())
        forward = backward = 0.0
        for shape, count in training.by_shape(kinds).items():
            time = self.layer_time(variant, shape)
            forward += count * time.forward
            backward += count * (time.backward + again * time.recomputation)
        return ChunkTime(forward, backward, backward)

    def _layers(self, place: int) -> tuple[Layers, ...]:
        """The layers of a chunk; its first ones are recomputed."""
        training = self.training
        layers = list[Layers]()
        recomputed = training.recomputed_layers(place)
        for shape, count in training.by_shape(training.places[place]).items():
            first = min(recomputed, count)
            recomputed -= first
            layers += [Layers(shape, first, True), Layers(shape, count - first)]
        return tuple(run for run in layers if run.number)


def _in_turns(machine: Machine, chunk: tuple[Layers, ...], *passes: Any) -> _Cost:
    """The cost of :func:`take_turns`, with its further arguments."""
    if not chunk:
        return 0.0, 0.0
    longest = max(chunk, key=lambda layers: layers.number)
    if longest.number <= _MOST:
        return _cost(machine, longest.shape.ranks, OVERLAP, take_turns, chunk, *passes)
    shorter = (
        tuple(layers._replace(number=n) if layers is longest else layers for layers in chunk)
        for n in (_MOST, _FEW)
    )
    costs = (_in_turns(machine, layers, *passes) for layers in shorter)
    share = (longest.number - _MOST) / (_MOST - _FEW)
    device, host = (most + share * (most - few) for most, few in zip(*costs, strict=True))
    return device, host


def _simulate(
    machine: Machine, ranks: int, variant: Variant, build: Callable[..., None], *more: Any
) -> Simulated:
    """Simulate what ``build(rank, *more)`` adds, as one of many in a row."""
    return simulate(Links(machine, ranks), variant, lambda rank: build(rank, *more), steady=True)


@lru_cache(1 << 14)
def _cost(machine: Machine, ranks: int, variant: Variant, *build: Any) -> _Cost:
    figures = machine
    if not variant.tuned:
        # Launches are free, also of the transfers of other groups: the host's time is counted
        # separately.
        figures = machine.launching_for_free
    simulated = _simulate(figures, ranks, variant, *build)
    return simulated.device, simulated.host(machine)
