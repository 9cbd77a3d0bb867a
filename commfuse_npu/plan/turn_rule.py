"""The rule by which passes take turns: it follows from their calls alone, never from times.

A pass is a forward, the gradients of another micro-batch, or a recomputation that runs ahead.  One
pass runs at a time.  It runs until it has started a blocking transfer, and then the next pass that
can run goes on, round robin::

    forward        | runs | transfer .............. | runs |
    gradients             | runs | transfer ............... | runs |
    recomputation                | runs | transfer .......

Weight gradients, for which nothing waits, are computed while every pass waits: one of them before
each wait of the first pass, after its turn has come back.  All ranks that run the same model hand
over at the same points, without agreeing on anything.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_WEIGHT_GRADIENTS", "filled_pass", "next_pass"]

MOST_WEIGHT_GRADIENTS = 4
"""The most weight gradients that wait; before one more is added, the oldest one is computed."""


def next_pass(can_run: Sequence[bool], running: int) -> int:
    """The number of the pass that runs after ``running``; the same one if no other can run.

    Args:
        can_run: of each pass, in the order of turns, whether it has not ended and waits for no
            other pass.
    """
    passes = len(can_run)
    return next(
        (at for step in range(1, passes) if can_run[at := (running + step) % passes]), running
    )


def filled_pass(recomputes: Sequence[bool]) -> int | None:
    """The pass before whose waits a weight gradient is computed, of those that have not ended.

    It is the first one that is not a recomputation: the forward, else the gradients.  Before every
    wait would be too early: the queue would be empty when the others wait, too.
    """
    return next((at for at, ahead in enumerate(recomputes) if not ahead), None)
