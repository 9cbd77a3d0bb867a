"""Pipeline parallelism, played by its dependencies: 1F1B and interleaved 1F1B.

1F1B (Narayanan et al. 2021): stage ``i`` of ``p`` runs ``p - 1 - i`` forwards, then one forward and
one backward in turn, then the backwards that are left.  For equal stages and free transfers this is
the closed form ``(m + p - 1) * (f + b)`` of ``m`` micro-batches.

Interleaved (the same; Megatron's ``--num-layers-per-virtual-pipeline-stage``): every stage has
``v`` chunks of layers, so that a micro-batch goes around ``v`` times, ``p`` micro-batches at a time
through each chunk; stage ``i`` begins with ``2 * (p - 1 - i) + (v - 1) * p`` forwards.  The bubble
is a ``v``-th of 1F1B's, ``m * (f + b) + (p - 1) * (f + b) / v`` in all, for ``v`` times as many
transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

__all__ = ["interleaves", "one_forward_one_backward"]


class _Part(NamedTuple):
    """A chunk of the model for a micro-batch.

    Attributes:
        work: the chunk's place in the model, forward; backward that many places further.
        before: what it gets its input from, alike; ``None``: from nobody.
    """

    work: int
    before: int | None
    number: int


def interleaves(stages: int, chunks: int, micro_batches: int) -> bool:
    """Whether Megatron has a schedule: micro-batches go through chunks ``stages`` at a time."""
    return chunks == 1 or (stages > 1 and micro_batches % stages == 0)


def one_forward_one_backward(
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    transfer: float = 0.0,
    chunks: int = 1,
) -> list[float]:
    """Play a step.

    Args:
        forward, backward: seconds of one micro-batch on each stage, and, with chunks, on each chunk
            of the model in its order: first chunks of all stages, then the second ones.
        micro_batches: at least one; with chunks divisible by the number of stages.
        transfer: seconds that an activation or its gradient takes to the next stage.
        chunks: of every stage.

    Returns:
        seconds from the start until each stage's last backward is done.
    """
    stages = len(forward) // chunks
    orders = [_order(stages, chunks, stage, micro_batches) for stage in range(stages)]
    seconds = (*forward, *backward)
    done: list[list[float | None]] = [[None] * micro_batches for _ in seconds]
    clock, position = [0.0] * stages, [0] * stages
    left = sum(map(len, orders))
    while left:
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
            left -= at - start
            position[stage], clock[stage] = at, now
    return clock


def _warm(stages: int, chunks: int, stage: int, micro_batches: int) -> int:
    """Forwards of chunks before the first backward."""
    if chunks == 1:
        return min(stages - 1 - stage, micro_batches)
    if micro_batches == stages:
        return micro_batches * chunks
    return min(2 * (stages - 1 - stage) + (chunks - 1) * stages, micro_batches * chunks)


@lru_cache(maxsize=256)
def _order(stages: int, chunks: int, stage: int, micro_batches: int) -> tuple[_Part, ...]:
    """What a stage does."""
    places = stages * chunks
    forwards, backwards = [], []
    # So many micro-batches go through a chunk at a time.
    together = stages if chunks > 1 else 1
    for one in range(micro_batches * chunks):
        turn, inside = divmod(one, together * chunks)
        chunk, number = divmod(inside, together)
        number += turn * together
        place = chunk * stages + stage
        forwards.append(_Part(place, place - 1 if place else None, number))
        place = (chunks - 1 - chunk) * stages + stage
        follows = places + place + 1 if place < places - 1 else None
        backwards.append(_Part(places + place, follows, number))
    warm = _warm(stages, chunks, stage, micro_batches)
    order = forwards[:warm]
    for ahead, back in zip(forwards[warm:], backwards, strict=False):
        order += [ahead, back]
    return (*order, *backwards[len(forwards) - warm :])
