"""Pipeline parallelism: the 1F1B schedule (Narayanan et al. 2021), played by its dependencies.

Stage ``i`` of ``p`` runs ``p - 1 - i`` forwards, then one forward and one backward in turn, then
the backwards that are left.  For equal stages and free transfers this is the closed form
``(m + p - 1) * (f + b)`` of ``m`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["one_forward_one_backward"]


def one_forward_one_backward(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, transfer: float = 0.0
) -> list[float]:
    """Play a step.

    Args:
        forward, backward: seconds of one micro-batch on each stage.
        micro_batches: at least one.
        transfer: seconds that an activation or its gradient takes to the next stage.

    Returns:
        seconds from the start until each stage's last backward is done.
    """
    stages = len(forward)
    orders = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, micro_batches)
        order = [("forward", i) for i in range(warm)]
        for i in range(micro_batches - warm):
            order += [("forward", warm + i), ("backward", i)]
        order += [("backward", i) for i in range(micro_batches - warm, micro_batches)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    left = sum(map(len, orders))
    while left:
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                kind, number = orders[stage][position[stage]]
                before = stage - 1 if kind == "forward" else stage + 1
                ready = 0.0
                if 0 <= before < stages:
                    if (kind, before, number) not in done:
                        break
                    ready = done[kind, before, number] + transfer
                seconds = forward[stage] if kind == "forward" else backward[stage]
                clock[stage] = max(clock[stage], ready) + seconds
                done[kind, stage, number] = clock[stage]
                position[stage] += 1
                left -= 1
    return clock
