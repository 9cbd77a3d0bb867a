"""Forward-backward overlap: a forward and a backward take turns on one stream, as launches.

Each side is launched in Megatron's order (:mod:`.llama`); the operations of both are then put in
the order in which the sides take turns (:mod:`commfuse_npu.plan.turn_order`), chosen from their own
work and transfers as a launch chooses it from its first step.  All transfers are collectives of one
communicator, in the order in which they are launched.  A hand-over costs the host a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from typing import NamedTuple

from commfuse_npu.plan.slots import Slot, slots
from commfuse_npu.plan.turn_order import Place, best_order, strict_turns
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.launches import COMPUTE, Operation
from commfuse_npu.tools.simulate.llama import Attended, LayerShape
from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["pair", "step_ends"]


class _Piece(NamedTuple):
    """Operations up to a place to hand over, and that place."""

    operations: range
    place: Place


def pair(
    rank: Rank,
    shape: LayerShape,
    layers: int,
    attention: tuple[Attended, Attended] | None,
    *,
    again: bool = False,
    strict: bool = False,
) -> None:
    """Add the forward of so many layers, and the backward of as many of another micro-batch.

    Args:
        attention: forward and backward; by default those of the shape.
        again: whether the backward runs each layer's forward before it (full recomputation).
        strict: take strict turns instead of choosing an order.
    """
    ahead, back = attention or (None, None)

    def forward(side: Rank) -> None:
        for _ in range(layers):
            llama.forward(side, shape, ahead)

    def backward(side: Rank) -> None:
        for _ in range(layers):
            if again:
                llama.forward(side, shape, ahead)
            llama.backward(side, shape, back)

    operations, pieces = [], []
    for name, build in (("forward", forward), ("backward", backward)):
        side = Rank(rank.machine, rank.rank, rank.size, rank.members_per_node, rank.variant)
        side.launches.prefix = f"{name} of a pair: "
        build(side)
        operations.append(side.finish().operations)
        pieces.append(_pieces(operations[-1], rank))
    sides = [piece.place for piece in pieces[0]], [piece.place for piece in pieces[1]]
    order = strict_turns(sides) if strict else best_order(sides)
    _merge(rank, operations, pieces, order)


def _pieces(operations: Sequence[Operation], rank: Rank) -> list[_Piece]:
    """Cut at transfers: after one began, and before work that waits for one begun earlier."""
    found: list[_Piece] = []
    start, work, under_way = 0, 0.0, list[range]()

    def cut(stop: int, transfer: float, waits: int | None, by_default: bool) -> None:
        nonlocal start, work
        found.append(_Piece(range(start, stop), Place(work, transfer, waits, by_default)))
        start, work = stop, 0.0

    for transfer, run in groupby(enumerate(operations), _transfer):
        numbers = [number for number, _ in run]
        begun = range(numbers[0], numbers[-1] + 1)
        if not isinstance(transfer, str):
            one = operations[begun.start]
            for waited in [other for other in under_way if set(other) & set(one.after)]:
                scatters = "scatter" in operations[waited[0]].name
                cut(begun.start, 0.0, under_way.index(waited), scatters)
                under_way.remove(waited)
            work += one.seconds
            continue
        sizes = [message.size for at in begun for message in operations[at].sends]
        follows = (one for one in operations[begun.stop :] if one.engine == COMPUTE)
        blocking = bool(set(begun) & {at for one in islice(follows, 1) for at in one.after})
        seconds = rank.machine.collective(max(sizes), rank.size)
        cut(begun.stop, seconds, len(under_way) if blocking else None, blocking)
        if not blocking:
            under_way.append(begun)
    cut(len(operations), 0.0, None, False)
    return found


def _transfer(numbered: tuple[int, Operation]) -> str | int:
    """The name of a transfer, which without batches is one operation to receive and one to send;
    of work its number, each being by itself."""
    number, one = numbered
    return number if one.engine == COMPUTE else one.name


def _merge(
    rank: Rank,
    operations: Sequence[Sequence[Operation]],
    pieces: Sequence[Sequence[_Piece]],
    order: Sequence[Sequence[bool]],
) -> None:
    """Launch the pieces of both sides in the order in which they take turns."""
    placed: tuple[dict[int, int], dict[int, int]] = {}, {}
    at, side = [0, 0], 0
    while any(at[which] < len(pieces[which]) for which in (0, 1)):
        if at[side] == len(pieces[side]):
            side = 1 - side
            continue
        number = at[side]
        for index in pieces[side][number].operations:
            one = operations[side][index]
            after = [placed[side][which] for which in one.after]
            placed[side][index] = rank.launches.again(one, after)
        at[side] += 1
        if order[side][number]:
            side = 1 - side
            rank.compute("hand over", 0.0)


def step_ends(
    forward: Sequence[float],
    backward: Sequence[float],
    pairs: Sequence[float],
    micro_batches: int,
    transfer: float,
    chunks: int,
) -> list[float]:
    """Play a step slot by slot (:mod:`commfuse_npu.plan.slots`).

    Args:
        forward, backward, pairs: seconds of one micro-batch on each chunk of the model in its
            order, alone and of both sides together.
        transfer: seconds of the exchange with the neighbours after a slot.

    Returns:
        seconds from the start until each stage's last backward is done.
    """
    stages = len(forward) // chunks
    plans = [slots(stages, stage, chunks, micro_batches) for stage in range(stages)]

    def seconds(stage: int, slot: Slot) -> float:
        ahead = None if slot.forward is None else slot.forward.chunk * stages + stage
        back = None if slot.backward is None else slot.backward.chunk * stages + stage
        if ahead is None or back is None:
            return (0.0 if ahead is None else forward[ahead]) + (
                0.0 if back is None else backward[back]
            )
        return (pairs[ahead] + pairs[back]) / 2

    clock, ends = [0.0] * stages, [0.0] * stages
    for slot in zip(*plans, strict=True):
        before = clock
        clock = []
        for stage, one in enumerate(slot):
            near = (
                {(stage + step) % stages for step in (-1, 0, 1)}
                if chunks > 1
                else {other for other in (stage - 1, stage, stage + 1) if 0 <= other < stages}
            )
            ready = max(before[other] for other in near)
            clock.append(ready + seconds(stage, one) + (transfer if stages > 1 else 0.0))
            if one.backward is not None:
                ends[stage] = clock[-1]
    return ends
