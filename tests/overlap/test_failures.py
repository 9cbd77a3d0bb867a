"""A rank that dies or hangs while a forward and a backward take turns."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap, OtherSideError
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.overlap.turns import BACKWARD, FORWARD

PIECES = 3


def run_until(rank: int, kind: str, side: int, at: int) -> None:
    """On rank 1 something happens before transfer ``at`` of a side."""
    limit = timedelta(seconds=60 if kind == "SIGKILL" else 3)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=limit)
    overlap = ForwardBackwardOverlap([group])

    def run(me: int) -> None:
        for piece in range(PIECES):
            if (rank, me, piece) == (1, side, at):
                if kind == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2 * limit.total_seconds())
            dist.all_reduce(torch.ones(2), group=group)

    try:
        overlap.run(lambda: run(FORWARD), lambda: run(BACKWARD))
    except OtherSideError:
        raise AssertionError("the first error has to be raised") from None
    finally:
        assert active_turns() is None


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("side", "at", "kind"),
    [
        (FORWARD, 0, "SIGKILL"),
        (BACKWARD, PIECES - 1, "SIGKILL"),
        (BACKWARD, 0, "hang"),
        pytest.param(FORWARD, PIECES - 1, "hang", marks=pytest.mark.long),
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
