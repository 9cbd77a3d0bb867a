"""A worker with torch_npu, or the reason why there is none."""

from collections.abc import Iterator

import pytest

from tests.npu.worker import NpuWorker, why_not


@pytest.fixture(scope="session")
def npu() -> Iterator[NpuWorker]:
    """A process with torch_npu, shared by the tests of a session."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    worker = NpuWorker()
    yield worker
    worker.kill()
