"""Pipeline schedules, simulated by their dependencies: 1F1B, interleaved 1F1B, overlapped pairs.

1F1B (Narayanan et al. 2021): stage ``i`` of ``p`` runs ``p - 1 - i`` forwards, then alternates one
forward and one backward, then runs the remaining backwards.  With equal stages and free transfers
``m`` micro-batches take ``(m + p - 1) * (f + b)``.

Interleaved (same source; Megatron's ``--num-layers-per-virtual-pipeline-stage``): every stage has
``v`` chunks of layers.  A micro-batch passes through all stages ``v`` times, and each chunk
processes ``p`` micro-batches at a time.  The bubble is ``1/v`` of that of 1F1B: the step takes
``m * (f + b) + (p - 1) * (f + b) / v``, with ``v`` times as many transfers.

:mod:`commfuse_npu.plan.slots` defines the order of forwards and of backwards, and the number of
forwards that come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from commfuse_npu.plan.slots import Slot, in_flight_without, slots

__all__ = ["interleaves", "one_forward_one_backward", "side_by_side"]


class _Part(NamedTuple):
    """A forward or a backward of one model chunk for one micro-batch.

    Attributes:
        work: the index of the chunk in the model; for a backward plus the number of chunks.
        before: the ``work`` whose output is its input; ``None`` if it needs none.
        number: the micro-batch.
    """

    work: int
    before: int | None
    number: int


def interleaves(stages: int, chunks: int, micro_batches: int) -> bool:
    """Whether Megatron supports it: micro-batches pass through chunks ``stages`` at a time."""
    return chunks == 1 or (stages > 1 and micro_batches % stages == 0)


def one_forward_one_backward(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
) -> list[float]:
    """Simulate a step.

    Args:
        forward, backward: seconds of one micro-batch on each stage.  With chunks: on each chunk in
            model order, first chunks of all stages, then second chunks.
        micro_batches: at least one; with chunks divisible by the number of stages.
        transfer: seconds to send an activation or its gradient to the next stage.
        chunks: per stage.

    Returns:
        Seconds from the start to the end of each stage's last backward.
    """
    stages = len(forward) // chunks
    orders = [_order(stages, chunks, stage, micro_batches) for stage in range(stages)]
    seconds = (*forward, *backward)
    done: list[list[float | None]] = [[None] * micro_batches for _ in seconds]
    clock, position = [0.0] * stages, [0] * stages
    remaining = sum(map(len, orders))
    while remaining:
        for stage, order in enumerate(orders):
            start, now = position[stage], clock[stage]
            at = start
            for work, before, number in islice(order, start, None):
                if before is not None:
                    ready = done[before][number]
                    if ready is None:
                        break
                    ready += transfer
                    if ready > now:
                        now = ready
                now += seconds[work]
                done[work][number] = now
                at += 1
            remaining -= at - start
            position[stage], clock[stage] = at, now
    return clock


@lru_cache(maxsize=256)
def _order(stages: int, chunks: int, stage: int, micro_batches: int) -> tuple[_Part, ...]:
    """The forwards and backwards of a stage, in order."""
    places = stages * chunks
    forwards, backwards = [], []
    for slot in slots(stages, stage, chunks, micro_batches):
        if slot.forward is not None:
            place = slot.forward.chunk * stages + stage
            before = place - 1 if place else None
            forwards.append(_Part(place, before, slot.forward.microbatch))
        if slot.backward is not None:
            place = slot.backward.chunk * stages + stage
            before = places + place + 1 if place < places - 1 else None
            backwards.append(_Part(places + place, before, slot.backward.microbatch))
    ahead = in_flight_without(stages, stage, chunks, micro_batches) - 1
    turns = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])


def side_by_side(
    forward: Sequence[float],
    backward: Sequence[float],
    pairs: Sequence[float],
    micro_batches: int,
    transfer: float,
    chunks: int,
) -> list[float]:
    """Simulate a step of forward-backward overlap, slot by slot (:mod:`commfuse_npu.plan.slots`).

    Args:
        forward, backward, pairs: seconds of one micro-batch on each chunk in model order: of each
            direction alone, and of both as a pair.
        transfer: seconds of the exchange with the neighbors after a slot.

    Returns:
        Seconds from the start to the end of each stage's last backward.
    """
    stages = len(forward) // chunks
    plans = [slots(stages, stage, chunks, micro_batches) for stage in range(stages)]

    def seconds(stage: int, slot: Slot) -> float:
        ahead, back = (
            None if part is None else part.chunk * stages + stage
            for part in (slot.forward, slot.backward)
        )
        if ahead is not None and back is not None:
            return (pairs[ahead] + pairs[back]) / 2
        return (0.0 if ahead is None else forward[ahead]) + (
            0.0 if back is None else backward[back]
        )

    def neighbours(stage: int) -> set[int]:
        near = stage - 1, stage, stage + 1
        if chunks > 1:  # the last stage sends to the first one
            return {neighbor % stages for neighbor in near}
        return {neighbor for neighbor in near if 0 <= neighbor < stages}

    clock, ends = [0.0] * stages, [0.0] * stages
    for row in zip(*plans, strict=True):
        ready = [max(clock[other] for other in neighbours(stage)) for stage in range(stages)]
        clock = [
            ready[stage] + seconds(stage, slot) + (transfer if stages > 1 else 0.0)
            for stage, slot in enumerate(row)
        ]
        ends = [
            end if slot.backward is None else now
            for end, now, slot in zip(ends, clock, row, strict=True)
        ]
    return ends
