"""Workers with torch_npu, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.npu.worker import Worker, why_not


def _workers(count: int) -> Iterator[list[Worker]]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    workers = [Worker() for _ in range(count)]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="session")
def npu() -> Iterator[Worker]:
    """A process with torch_npu, shared by the tests of a session."""
    for (worker,) in _workers(1):
        yield worker


@pytest.fixture
def npu_pair() -> Iterator[list[Worker]]:
    """Two new ones, for a process group."""
    yield from _workers(2)
