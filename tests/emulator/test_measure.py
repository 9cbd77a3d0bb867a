"""What ``measure`` asks of lanes, on an emulated HCCL: nothing hangs, and all of it arrives."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_npu.tools.measure.worker import Worker
from tests.emulator.settings import Settings


def questions(rank: int, size: int) -> None:
    """Every one that posts something; a message that is another one's raises."""
    worker = Worker()
    worker.latency(2)
    worker.posting(2, batched=True)
    worker.launching(2)
    worker.communicator(None)
    worker.beside(16, 8, 8, 64, 2)
    for lanes in range(1, size):
        worker.lanes(64, lanes, 2)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_question_hangs(emulated: Any, size: int) -> None:
    emulated(size, Settings(max_delay=0.0005, seed=size)).run(questions, size)


def test_no_question_hangs_where_lanes_share_streams(emulated: Any) -> None:
    emulated(4, Settings(max_delay=0.0005, streams=2)).run(questions, 4)
