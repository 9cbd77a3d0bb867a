"""Faults in the own process: what a rank does to itself, at a place that it counts its way to.

Nothing in the product knows of this: the methods through which a rank sends, allocates and makes
groups are wrapped, in the faulty process only.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commfuse_npu.runtime import executor
from commfuse_npu.runtime.scratch import ScratchPool
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.wire import connected_sockets
from scripts.evidence.faults.operations import UserError
from scripts.evidence.faults.scenario import Phase, Scenario

__all__ = ["Plant", "connections", "user_code"]

_Report = Callable[..., None]


class Plant:
    """Counts the rank's sends (allocations, groups) per phase, and acts at the chosen one.

    The first run of an operation is left alone and tells how many there are in each phase; the
    second meets the fault.

    Args:
        report: told of the fault just before it happens, and when the rank goes on after it.
        folder: where the ranks wrote their connections.
    """

    def __init__(self, scenario: Scenario, report: _Report, folder: Path) -> None:
        self._scenario = scenario
        self._report = report
        self._folder = folder
        self._counted: Counter[str] = Counter()
        self._phase = ""
        self._at: int | None = None
        fault = scenario.fault
        if fault == "no memory for scratch":
            self._wrap(ScratchPool, "take")
        elif fault == "no memory for the output":
            self._wrap(torch.Tensor, "new_empty")
        elif scenario.phase == "making lanes":
            self._wrap(dist, "new_group")
        else:
            # What programs send, and nobody else.
            calls = SimpleNamespace(**vars(dist))
            mock.patch.object(executor, "dist", calls).start()
            self._wrap(calls, "isend")

    def _wrap(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            count = self._counted[self._phase]
            self._counted[self._phase] += 1
            if count != self._at:
                return real(*args, **kwargs)
            self._at = None
            with _restored_limit():
                self._act()
                return real(*args, **kwargs)

        mock.patch.object(owner, name, wrapped).start()  # for the rest of the process

    def enter(self, phase: Phase, *, armed: bool, transport: Transport | None = None) -> None:
        """A phase begins; act in it if it is the chosen one and ``armed``."""
        before = self._counted[phase]
        self._phase = phase
        self._counted[phase] = 0
        if not armed or phase != self._scenario.phase:
            return
        if phase in ("first use", "between"):
            self._act()
            return
        if phase == "making lanes":
            # The groups of the lanes and the control group; nothing has counted them before.
            before = self._scenario.lanes + 1
        if before == 0:
            raise RuntimeError(f"nothing to count in {phase} of {self._scenario.operation}")
        self._at = {"first": 0, "middle": before // 2, "last": before - 1}[self._scenario.place]
        if transport is not None and "memory" in self._scenario.fault:
            transport.scratch.clear()

    def _act(self) -> None:
        self._report(what="fault", at=time.monotonic())
        fault = self._scenario.fault
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "user error":
            user_code()
        elif fault in ("slow", "too slow"):
            limit = self._scenario.timeout
            time.sleep(limit / 2 if fault == "slow" else limit + 2.0)
            self._report(what="woke", at=time.monotonic())
        elif fault == "all connections lost":
            _shut_down(lambda ends: True)
        elif fault == "one connection lost":
            file = self._folder / f"connections-{self._scenario.peer}.json"
            theirs = {tuple(ends) for ends in json.loads(file.read_text(encoding="utf-8"))}
            _shut_down(lambda ends: ends[::-1] in theirs)
        elif fault.startswith("no memory"):
            torch.empty(1 << 60, dtype=torch.uint8)  # the allocator's own error
        elif fault == "no lane: too many open files":
            # Nothing that is open is closed; nothing more can be opened.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        else:
            raise ValueError(f"fault {fault!r} cannot be planted in a process")


@contextmanager
def _restored_limit() -> Iterator[None]:
    """What is short in a moment need not be so at the end of the process, which opens files too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def user_code() -> None:
    """Stands for the program around the product, with a mistake in it."""
    raise UserError("a mistake in the program")


def connections() -> list[tuple[int, int]]:
    """``(own port, port of the other end)`` of every TCP connection of this process."""
    return [ends for _, ends in _connections()]


def _shut_down(chosen: Callable[[tuple[int, int]], bool]) -> None:
    for one, ends in _connections():
        if chosen(ends):
            with _unless_gone():
                one.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[socket.socket, tuple[int, int]]]:
    for one in connected_sockets():
        with one, _unless_gone():
            yield one, (one.getsockname()[1], one.getpeername()[1])


@contextmanager
def _unless_gone() -> Iterator[None]:
    """The other end may have closed a connection because another one was lost."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
