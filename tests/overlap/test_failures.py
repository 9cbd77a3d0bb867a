"""A rank that dies, hangs or finds a NaN while a forward and a backward take turns."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap, OtherSideError
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD, FORWARD

PIECES = 3


class NotFiniteError(ArithmeticError):
    """What Megatron's check of losses and gradients raises, in other words."""


def run_until(rank: int, kind: str, side: int, at: int) -> list[str]:
    """On rank 1 something happens before transfer ``at`` of a side; the others go on as long as
    they can.  Returns which sides ended with the other one's error."""
    limit = timedelta(seconds=60 if kind == "SIGKILL" else 3)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
    assert group is not None
    overlap = ForwardBackwardOverlap([group])
    ended: list[str] = []

    def run(me: int) -> None:
        try:
            for piece in range(PIECES):
                value = torch.ones(2)
                if (rank, me, piece) == (1, side, at):
                    happen(kind, value, limit.total_seconds())
                if not bool(torch.isfinite(value).all()):
                    raise NotFiniteError(f"side {me}, transfer {piece}")
                dist.all_reduce(value, group=group)
        except OtherSideError:
            ended.append("the other side's error")
            raise

    try:
        overlap.run(lambda: run(FORWARD), lambda: run(BACKWARD))
    except OtherSideError:
        raise AssertionError("the first error has to be raised") from None
    finally:
        assert active_turns() is None
    return ended


def happen(kind: str, value: torch.Tensor, limit: float) -> None:
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(2 * limit)
    else:
        value[0] = float("nan")


LONG = pytest.mark.long


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=LONG)])
@pytest.mark.parametrize(
    ("side", "at", "kind"),
    [
        *product((FORWARD, BACKWARD), (0, PIECES - 1), ["SIGKILL"]),
        (BACKWARD, 0, "hang"),
        pytest.param(FORWARD, PIECES - 1, "hang", marks=LONG),
    ],
)
def test_the_others_end_with_an_error(ranks: Any, size: int, side: int, at: int, kind: str) -> None:
    found = ranks(size).outcomes(run_until, kind, side, at, may_die=True, timeout=120, grace=90)
    for rank, outcome in enumerate(found):
        if rank == 1 and kind == "SIGKILL":
            assert isinstance(outcome.error, EOFError)
        else:
            assert isinstance(outcome.error, RuntimeError), f"rank {rank}: {outcome}"
            # As gloo says it on either end: "[.../gloo/...] Timed out", "Application timeout".
            assert re.search("gloo|timed out|timeout", str(outcome.error), re.IGNORECASE)


@pytest.mark.parametrize(
    ("side", "at"),
    [
        (FORWARD, 0),
        (BACKWARD, PIECES - 1),
        *(pytest.param(side, 1, marks=LONG) for side in (FORWARD, BACKWARD)),
    ],
)
def test_a_nan_on_one_side_ends_the_rank_by_its_own_name(ranks: Any, side: int, at: int) -> None:
    found = ranks(2).outcomes(run_until, "NaN", side, at, may_die=True, timeout=120, grace=60)
    error = found[1].error
    assert type(error).__name__ == "NotFiniteError"
    assert f"side {side}, transfer {at}" in str(error)
