"""Processes as the ranks of an emulated HCCL, handed out as those of gloo are.

A run that every rank ends without an exception has to leave nothing behind: a transfer without its
other end hangs the next operation of its communicator on the real HCCL, so it fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.distributed.ranks import Gloo, Outcome, Ranks, _context
from tests.emulator.link import Link
from tests.emulator.referee_thread import RefereeThread
from tests.emulator.settings import Settings
from tests.limits import LIMIT, PATIENT


class EmulatedHccl(Gloo):
    """An emulated HCCL in the place of gloo.

    Args:
        line: to the referee.
    """

    # The referee finds a deadlock when no thread can post any more; one that waits for a backward
    # in another thread looks to it as if it could.  It also keeps the caller's thread tested.
    backward_apart = False

    def __init__(self, line: Connection) -> None:
        self.line = line
        self._link: Link | None = None

    def join(self, size: int) -> None:
        import torch.distributed as dist

        from tests.emulator.backend import BACKEND, register

        self._link = Link(self.line, Settings())
        register(self._link, size)
        dist.init_process_group(BACKEND, timeout=PATIENT)

    def begin(self, settings: Settings) -> None:
        assert self._link is not None
        self._link.begin(settings)

    def end(self, error: BaseException | None) -> None:
        assert self._link is not None
        self._link.end(error)


class EmulatedRanks(Ranks):
    """As :class:`Ranks`, with an emulated HCCL as the backend.

    Attributes:
        settings: of the next run.
        prepare: called in each process before its first function.
    """

    def __init__(self, size: int, prepare: Callable[[], None] | None = None) -> None:
        super().__init__(size)
        self.settings = Settings()
        self._prepare = prepare
        self._referee: RefereeThread | None = None
        self._to_referee: list[tuple[Connection, Connection]] = []

    def backend_of(self, rank: int) -> EmulatedHccl:
        ours, theirs = _context.Pipe()
        self._to_referee.append((ours, theirs))
        return EmulatedHccl(theirs)

    def settings_of_run(self) -> Settings:
        return self.settings

    def _start(self) -> None:
        super()._start()
        lines, self._to_referee = self._to_referee, []
        for _, line in lines:
            line.close()
        self._referee = RefereeThread([referee for referee, _ in lines], self.settings)
        if self._prepare is not None:
            self.run(_prepared, self._prepare)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = LIMIT,
        may_die: bool = False,
        grace: float = 20.0,
    ) -> list[Outcome]:
        if not self._processes:
            self._start()
        assert self._referee is not None
        self._referee.begin(self.settings)
        return super().outcomes(function, *args, timeout=timeout, may_die=may_die, grace=grace)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
        values = super().run(function, *args, timeout=timeout)
        assert self._referee is not None
        left = self._referee.left_over()
        if left:
            self.kill()
            pytest.fail("never took place:\n" + "\n".join(left))
        return values

    def kill(self) -> None:
        super().kill()
        if self._referee is not None:
            referee, self._referee = self._referee, None
            referee.close()


def _prepared(rank: int, prepare: Callable[[], None]) -> None:
    prepare()
