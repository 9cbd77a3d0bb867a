"""Passes that take turns by :mod:`commfuse_npu.plan.turn_rule`, as operations of a rank.

==============  ====================================================================================
forward         of the next micro-batch, where it runs beside the gradients
gradients       of this micro-batch; where their layer is recomputed, the next layer's recomputation
                runs ahead, beside them
recomputation   of one layer; the first one of a chain has no gradients beside it, and is a part of
                the pass of the gradients
==============  ====================================================================================

Each layer is launched as in Megatron's order (:mod:`.llama`), and a pass hands over where its work
waits for a collective; a ring's passes of keys and values are none.  Weight gradients leave their
pass for a queue, with the gathered inputs that they wait for.  All transfers are collectives of one
communicator, in launch order.  A change of the running pass costs a host launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from commfuse_npu.plan.turn_rule import MOST_WEIGHT_GRADIENTS, filled_pass, next_pass
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import COMPUTE, Operation
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import RING, Rank


class Layers(NamedTuple):
    """A number of equal layers, and whether each is a checkpoint that is recomputed."""

    shape: LayerShape
    number: int
    recomputed: bool = False


def take_turns(
    rank: Rank,
    chunk: Sequence[Layers],
    forward: bool,
    backward: bool,
    most_waiting: int = MOST_WEIGHT_GRADIENTS,
) -> None:
    """Add passes over layers, given in the order of the model.

    Args:
        forward, backward: which there are; both are of different micro-batches.
        most_waiting: most weight gradients in the queue; 0: none leaves its pass.
    """
    layers = [layer for layer in chunk for _ in range(layer.number)]
    turns = _TimedTurns(rank, most_waiting)
    if forward:
        turns.begin(turns.forward(layers))
    if backward:
        turns.begin(turns.gradients(layers))
    turns.run()


@dataclass
class _TimedPass:
    """A pass.

    Attributes:
        launches: launches its operations, and stops where it waits: for the end of another pass, or
            (``None``) for a transfer.
        ahead: whether it is a recomputation.
        waits: the pass for whose end it waits.
    """

    launches: Iterator[_TimedPass | None]
    ahead: bool
    ended: bool = False
    waits: _TimedPass | None = None

    @property
    def can_run(self) -> bool:
        return not self.ended and (not self.waits or self.waits.ended)

    def run(self) -> None:
        """Run until it waits, or to its end."""
        try:
            self.waits = next(self.launches)
        except StopIteration:
            self.ended = True


class _TimedTurns:
    """Passes, and the weight gradients that wait."""

    def __init__(self, rank: Rank, most_waiting: int) -> None:
        self._rank = rank
        self._most = most_waiting
        self._passes: list[_TimedPass] = []
        self._queue: deque[Callable[[], object]] = deque()

    def begin(self, launches: Iterator[_TimedPass | None], ahead: bool = False) -> _TimedPass:
        """Let a pass take turns with the others."""
        self._passes.append(_TimedPass(launches, ahead))
        return self._passes[-1]

    def run(self) -> None:
        """Run all passes, and then the weight gradients that are left."""
        at = 0
        while remaining := [each for each in self._passes if not each.ended]:
            running = self._passes[at]
            filled = filled_pass([each.ahead for each in remaining])
            if running.waits is None and filled is not None and remaining[filled] is running:
                self._keep_at_most(len(self._queue) - 1)
            running.run()
            following = next_pass([each.can_run for each in self._passes], at)
            if following != at:
                self._rank.compute("hand over", 0.0)
            at = following
        self._keep_at_most(0)

    def forward(self, layers: Sequence[Layers]) -> Iterator[_TimedPass | None]:
        """The pass of a forward."""
        for layer in layers:
            yield from self._launch(llama.forward, layer)

    def gradients(self, layers: Sequence[Layers]) -> Iterator[_TimedPass | None]:
        """The pass of the gradients, which begins the recomputations that run ahead."""
        ahead: _TimedPass | None = None
        for layer, before in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
            if not ahead and layer.recomputed:
                yield from self._launch(llama.recomputation, layer)
            elif ahead and not ahead.ended:
                yield ahead
            ahead = None
            if layer.recomputed and before and before.recomputed:
                ahead = self.begin(self._launch(llama.recomputation, before), ahead=True)
            yield from self._launch(llama.backward, layer)

    def _launch(
        self, part: Callable[[Rank, LayerShape], None], layer: Layers
    ) -> Iterator[_TimedPass | None]:
        """Launch a part of a layer; its weight gradients wait in the queue."""
        rank = self._rank
        placed = dict[int, int]()
        own = Rank(rank.links, rank.rank, rank.variant, rank.keys)
        part(own, layer.shape)
        operations = own.finish()
        for index, operation in enumerate(operations):
            of_weight = "wgrad" in operation.name
            if of_weight and self._most:
                self._keep_at_most(self._most - 1)
                self._queue.append(partial(self._place, operation, placed))
                continue
            awaited = (operations[need] for need in operation.after)
            transfers = any(other.engine != COMPUTE and other.name != RING for other in awaited)
            if transfers and operation.engine == COMPUTE and not of_weight:
                yield None
            placed[index] = self._place(operation, placed)

    def _place(self, operation: Operation, placed: Mapping[int, int]) -> int:
        """Launch an operation after those of its part that were launched before it."""
        return self._rank.repeat(
            operation, (placed[need] for need in operation.after if need in placed)
        )

    def _keep_at_most(self, many: int) -> None:
        """Compute the oldest weight gradients until so many are left."""
        while self._queue and len(self._queue) > many:
            self._queue.popleft()()
