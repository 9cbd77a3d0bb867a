"""A process with the real torch_npu in it, started once and used by many tests.

torch_npu changes torch for good and needs stand-ins for CANN where the dynamic loader looks when
the process starts.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import TimeoutError as TooLong
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.limits import LIMIT
from tests.worker import Worker

ENVIRONMENT = Path(f"{sys.prefix}-npu")
"""Environment of torch_npu that scripts/environment.sh creates beside that of the tests."""


def _import_torch_npu(packages: list[str]) -> None:
    """In the worker: adds ``packages`` to the tests' path and imports torch_npu."""
    sys.path[:0] = packages
    import torch
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)


class NpuWorker(Worker):
    """A process with torch_npu imported."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        context.set_executable(str(ENVIRONMENT / "bin/python"))
        packages = list(map(str, ENVIRONMENT.glob("lib/python*/site-packages")))
        super().__init__(context, _import_torch_npu, packages)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Any:
        """The result of ``function(*args)``; a crash or a call that takes too long fails."""
        settings = {
            "LD_LIBRARY_PATH": str(ENVIRONMENT / "cann"),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        try:
            with mock.patch.dict(os.environ, settings):  # the first call starts the process
                return self.submit(function, *args).result(timeout)
        except (BrokenProcessPool, TooLong) as error:
            self.kill()
            pytest.fail(f"{function.__name__}{args}: {str(error) or f'longer than {timeout:g} s'}")
