"""A worker with torch_npu, or the reason why there is none."""

from collections.abc import Iterator

import pytest

from tests.npu.worker import ENVIRONMENT, NpuWorker


@pytest.fixture(scope="session")
def npu() -> Iterator[NpuWorker]:
    """A process with torch_npu, shared by the tests of a session."""
    parts = ".installed-npu", "cann/libstand_ins.so", "bin/python"
    lacking = [path for path in map(ENVIRONMENT.joinpath, parts) if not path.exists()]
    if lacking:
        install = "`bash scripts/test.sh tests/npu` installs torch_npu there, or says why it cannot"
        pytest.skip(f"{lacking[0]} is missing; {install}")
    worker = NpuWorker()
    yield worker
    worker.kill()
