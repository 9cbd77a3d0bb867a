"""Processes as the ranks of an emulated HCCL, handed out as those of gloo are.

A run that every rank ends without an exception has to leave nothing behind: a transfer without its
other end hangs the next operation of its communicator on the real HCCL, so it fails the test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.distributed.ranks import Outcome, Ranks, _context, _free_port, set_up_process
from tests.emulator.referee_thread import RefereeThread
from tests.emulator.settings import Settings


def _work(rank: int, size: int, port: int, pipe: Connection, line: Connection) -> None:
    set_up_process(rank, size, port)
    import torch.distributed as dist

    from tests.emulator.backend import BACKEND, register
    from tests.emulator.link import Link

    link = Link(line, Settings())
    register(link, size)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    while True:
        try:
            settings, function, args = pipe.recv()
        except EOFError:
            return  # the tests are over
        link.begin(settings)
        failure = None
        try:
            outcome = Outcome(value=function(rank, *args))
        except BaseException as error:
            failure = error
            outcome = Outcome(error=error, trace=traceback.format_exc())
        link.end(failure)
        try:
            pipe.send(outcome)
        except Exception as error:
            # The value or the exception cannot be pickled: send its text.
            text = f"{outcome.error or outcome.value!r}: {error}"
            pipe.send(Outcome(error=RuntimeError(text), trace=outcome.trace))


class _WithSettings:
    """The end of a pipe that tells a rank the settings with every function."""

    def __init__(self, pipe: Connection, ranks: EmulatedRanks) -> None:
        self._pipe = pipe
        self._ranks = ranks

    def send(self, message: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        self._pipe.send((self._ranks.settings, *message))

    def recv(self) -> Any:
        return self._pipe.recv()

    def fileno(self) -> int:
        return self._pipe.fileno()


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

    def _start(self) -> None:
        port = _free_port()
        to_referee = []
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            referee, line = _context.Pipe()
            process = _context.Process(target=_work, args=(rank, self.size, port, theirs, line))
            process.daemon = True
            process.start()
            theirs.close()
            line.close()
            self._processes.append(process)
            self._pipes.append(_WithSettings(ours, self))  # type: ignore[arg-type]
            to_referee.append(referee)
        self._referee = RefereeThread(to_referee, self.settings)
        if self._prepare is not None:
            self.run(_prepared, self._prepare)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        may_die: bool = False,
    ) -> list[Outcome]:
        if not self._processes:
            self._start()
        assert self._referee is not None
        self._referee.begin(self.settings)
        return super().outcomes(function, *args, timeout=timeout, may_die=may_die)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
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
