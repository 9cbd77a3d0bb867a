"""A process with the real torch_npu in it, started once and used by many tests.

torch_npu changes torch for good and needs stand-ins for CANN where the dynamic loader looks when
the process starts, so it gets a process of its own.  A test hands a top-level function to
:meth:`Worker.run` and gets what it returned; an exception in it, a crash and a call that takes too
long fail the test.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT

ENVIRONMENT = Path(f"{sys.prefix}-npu")
"""What scripts/environment.sh makes: torch_npu beside the environment that runs the tests."""

_ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """Why there can be no worker; ``None`` if there can."""
    for part in (".installed-npu", "cann/stubs.json", "bin/python"):
        if not (ENVIRONMENT / part).exists():
            return (
                f"{ENVIRONMENT / part} is missing; `bash scripts/test.sh tests/npu` installs "
                "torch_npu there, or says why it cannot"
            )
    return None


class Worker:
    """A process that runs functions of the tests with torch_npu imported."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(ENVIRONMENT / "cann"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [ENVIRONMENT / "bin/python", "-m", "tests.npu.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stderr=self._errors,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._receive("import torch_npu", LIMIT)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin to run ``function(*args)``; the function is found by name over there."""
        if self._process is None:
            self._start()
        self._pipe.send((function, args))
        self._running = f"{function.__name__}{args}"

    def receive(self, timeout: float = LIMIT) -> Any:
        """What the function returned; fails the test if it raised."""
        return self._receive(self._running, timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> Any:
        """:meth:`send` and :meth:`receive`."""
        self.send(function, *args)
        return self.receive(timeout)

    def _receive(self, what: str, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            self.stop()
            pytest.fail(f"{what} takes longer than {timeout:g} s\n{self._said()}")
        try:
            succeeded, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self.stop()
            pytest.fail(f"the worker died in {what}\n{self._said()}")
        if not succeeded:
            pytest.fail(f"in the worker, {what}:\n{value}")
        return value

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def stop(self) -> None:
        """End this process, and only this; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None


def serve(pipe: Connection) -> None:
    """What runs in the worker."""
    import torch
    import torch_npu

    torch.set_num_threads(1)
    pipe.send((True, torch_npu.__version__))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args)
        # pytest's own exceptions (a test that fails in here) are no Exception.
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
