"""A process with the real torch_npu in it, started once and used by many tests.

torch_npu changes torch for good and needs stand-ins for CANN where the dynamic loader looks when
the process starts.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLong
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.limits import LIMIT
from tests.processes import kill_workers

ENVIRONMENT = Path(f"{sys.prefix}-npu")
"""Environment of torch_npu that scripts/environment.sh creates beside that of the tests."""


def _import_torch_npu(packages: list[str]) -> None:
    """In the worker: adds ``packages`` to the tests' path and imports torch_npu."""
    sys.path[:0] = packages
    import torch
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)


class NpuWorker:
    """A process with torch_npu imported, started by the first call, and after a kill again."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Any:
        """The result of ``function(*args)``; a crash or a call that takes too long fails."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            context.set_executable(str(ENVIRONMENT / "bin/python"))
            packages = list(map(str, ENVIRONMENT.glob("lib/python*/site-packages")))
            self._pool = ProcessPoolExecutor(1, context, _import_torch_npu, (packages,))
        settings = {
            "LD_LIBRARY_PATH": str(ENVIRONMENT / "cann"),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        try:
            with mock.patch.dict(os.environ, settings):  # the first call starts the process
                return self._pool.submit(function, *args).result(timeout)
        except (BrokenProcessPool, TooLong) as error:
            self.kill()
            pytest.fail(f"{function.__name__}{args}: {str(error) or f'longer than {timeout:g} s'}")

    def kill(self) -> None:
        """End this process, and only this."""
        if self._pool is not None:
            kill_workers(self._pool)
            self._pool = None
