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

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

from commfuse_npu.plan.slots import Slot, in_flight_without, slots


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
    orders = [deque(_order(stages, chunks, stage, micro_batches)) for stage in range(stages)]
    seconds = (*forward, *reversed(backward))
    done: list[list[float]] = [[] for _ in seconds]
    clock = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                part, number = order[0]
                if part and len(done[part - 1]) <= number:
                    break
                # The last stage begins the backward with its own output.
                received = part and part != len(forward)
                ready = done[part - 1][number] + transfer if received else 0.0
                clock[stage] = max(clock[stage], ready) + seconds[part]
                done[part].append(clock[stage])
                order.popleft()
    return clock


@lru_cache(maxsize=256)
def _order(stages: int, chunks: int, stage: int, micro_batches: int) -> tuple[tuple[int, int], ...]:
    """The forwards and backwards of a stage: each one's part and micro-batch.

    The parts of a micro-batch are the forwards of all chunks, then their backwards, in order.
    """
    plan = slots(stages, stage, chunks, micro_batches)
    last = 2 * stages * chunks - 1
    forwards = [(step.chunk * stages + stage, step.microbatch) for step, _ in plan if step]
    backwards = [(last - step.chunk * stages - stage, step.microbatch) for _, step in plan if step]
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
        ahead, back = (None if part is None else part.chunk * stages + stage for part in slot)
        if ahead is None:
            return 0.0 if back is None else backward[back]
        return forward[ahead] if back is None else (pairs[ahead] + pairs[back]) / 2

    clock = [0.0] * stages
    ends = [0.0] * stages
    after_slot = transfer if stages > 1 else 0.0
    for row in zip(*plans, strict=True):
        # A stage exchanges with its neighbors; of chunks the last stage sends to the first.
        around = [clock[-1], *clock, clock[0]] if chunks > 1 else [0.0, *clock, 0.0]
        clock = [
            max(around[stage : stage + 3]) + seconds(stage, slot) + after_slot
            for stage, slot in enumerate(row)
        ]
        ends = [
            now if slot.backward else end for end, now, slot in zip(ends, clock, row, strict=True)
        ]
    return ends
