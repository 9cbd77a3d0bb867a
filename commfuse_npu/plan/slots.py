"""Pairs forwards and backwards that run side by side, on each stage of a pipeline.

Time is divided into slots.  In a slot a stage runs at most one forward and one backward, side by
side, and then exchanges activations and gradients with its neighbors.  With ``p`` stages, ``v``
model chunks per stage and ``m`` micro-batches, stage ``s`` runs in slot ``t``::

    forward   number t - s                      of m * v
    backward  number t - (p - 1 - s) - v * p    of m * v

numbered in the order of Megatron's interleaved 1F1B schedule (``get_schedule_table`` of core
0.12): ``p`` micro-batches through the first chunk, the same ``p`` through the next one, ...;
backwards with the chunks reversed.  The input of a stage in slot ``t`` is the output of its
neighbor in slot ``t - 1``, and the last stage runs its first backward one slot after its forward.
Without a pipeline, the forward of micro-batch i + 1 runs beside the backward of micro-batch i.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "Slot",
    "Step",
    "in_flight_without",
    "most_in_flight",
    "paired_microbatches",
    "recomputes_all",
    "slots",
]


class Step(NamedTuple):
    """The forward or backward of a micro-batch through a model chunk."""

    microbatch: int
    chunk: int


class Slot(NamedTuple):
    """What a stage runs in a slot; ``None``: no forward, or no backward."""

    forward: Step | None
    backward: Step | None


@lru_cache(maxsize=64)
def slots(stages: int, stage: int, chunks: int, microbatches: int) -> tuple[Slot, ...]:
    """The slots of a stage, the same number on every stage; cached, as every step needs them.

    Args:
        chunks: model chunks per stage, 1 without a virtual pipeline.

    Raises:
        ValueError: ``chunks > 1`` and ``microbatches`` is not a multiple of ``stages``.
    """
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"{microbatches} micro-batches are not a multiple of the {stages} stages of a virtual "
            "pipeline; change the global batch size"
        )
    group = stages if chunks > 1 else microbatches
    order = [
        Step(first + offset, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for offset in range(group)
    ]
    total = len(order)
    lag = stages - 1 - stage + chunks * stages

    def step(number: int) -> Step | None:
        return order[number] if 0 <= number < total else None

    def backward(number: int) -> Step | None:
        forward = step(number)
        return forward and Step(forward.microbatch, chunks - 1 - forward.chunk)

    times = range(total + stages - 1 + chunks * stages)
    return tuple(Slot(step(t - stage), backward(t - lag)) for t in times)


def most_in_flight(plan: Sequence[Slot]) -> int:
    """The most forwards that hold activations at a time; both sides of a slot count."""
    most = in_flight = 0
    for slot in plan:
        in_flight += slot.forward is not None
        most = max(most, in_flight)
        in_flight -= slot.backward is not None
    return most


def in_flight_without(stages: int, stage: int, chunks: int, microbatches: int) -> int:
    """:func:`most_in_flight` in Megatron's own order, 1F1B: its warm-up forwards and one more."""
    ahead = stages - 1 - stage
    warm_up = 2 * ahead + (chunks - 1) * stages if chunks > 1 else ahead
    if chunks > 1 and microbatches == stages:
        warm_up = microbatches * chunks  # as in Megatron's interleaved schedule
    return min(microbatches * chunks, warm_up + 1)


def recomputes_all(
    granularity: str | None, method: str | None, number: int | None, layers: int
) -> bool:
    """Whether all layers of a stage are recomputed, so that a micro-batch keeps only their inputs.

    Args:
        granularity, method, number: Megatron's ``--recompute-granularity``, ``-method``,
            ``-num-layers``.
        layers: of the stage.
    """
    return granularity == "full" and (method != "block" or (number or 1) >= layers)


def paired_microbatches(plan: Sequence[Slot]) -> tuple[int, int]:
    """Number of forwards that run beside a backward, and number of all forwards."""
    forwards = [slot for slot in plan if slot.forward is not None]
    return sum(slot.backward is not None for slot in forwards), len(forwards)
