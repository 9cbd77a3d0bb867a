"""The referee at work: a thread of the process that starts the ranks, with a pipe to each of them.

It stays alive when a rank dies, and it knows when the ranks start a function.  Each rank has a
second thread for what is said to it, so that the referee never stands still over a full pipe.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from tests.emulator.messages import ToRank
from tests.emulator.referee import Referee
from tests.emulator.settings import Settings

_QUIET = 0.005
"""Seconds without a message after which the referee looks for deadlocks."""

_LONGEST = 10.0
"""Seconds until what ranks said before their end has to be heard."""


class RefereeThread:
    """Serves the other ends of ``pipes``, one per rank, until :meth:`close`."""

    def __init__(self, pipes: list[Connection], settings: Settings) -> None:
        self._pipes = pipes
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[ToRank | None]] = [SimpleQueue() for _ in pipes]
        self._referee = Referee(len(pipes), settings, lambda rank, m: self._queues[rank].put(m))
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads += [
            threading.Thread(target=self._speak, args=(rank,), daemon=True)
            for rank in range(len(pipes))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, settings: Settings) -> None:
        """Before the ranks are told to start a function."""
        with self._lock:
            self._referee.begin(settings)

    def left_over(self) -> list[str]:
        """After a function: the operations that never took place."""
        end = time.monotonic() + _LONGEST
        while time.monotonic() < end:
            with self._lock:
                if self._referee.at_rest:
                    return self._referee.left_over()
            time.sleep(_QUIET)
        raise TimeoutError(f"the ranks did not come to rest within {_LONGEST} s")

    def close(self) -> None:
        """End the threads.  The ranks are gone already, or their waits fail."""
        self._waker.send(None)
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()
        for pipe in (*self._pipes, self._wake, self._waker):
            pipe.close()
        if self._error is not None:
            raise self._error

    def _speak(self, rank: int) -> None:
        while (message := self._queues[rank].get()) is not None:
            try:
                self._pipes[rank].send(message)
            except OSError:
                return  # the rank is gone; the listening thread sees the same and says so

    def _listen(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._error = error
            for pipe in self._pipes:
                pipe.close()  # every rank that waits is told at once

    def _serve(self) -> None:
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while True:
            ready = wait([*ranks, self._wake], self._pause())
            if self._wake in ready:
                return
            with self._lock:
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    try:
                        message = pipe.recv()
                    except (EOFError, OSError):
                        self._referee.lost(ranks.pop(pipe))
                        continue
                    self._referee.handle(ranks[pipe], message, time.monotonic())
                self._referee.tick(time.monotonic())
                if not ready:
                    self._referee.settle()

    def _pause(self) -> float | None:
        """How long nothing can happen unless a rank says something."""
        with self._lock:
            due, unsettled = self._referee.due(), self._referee.unsettled
        pauses = [_QUIET] if unsettled else []
        pauses += [max(0.0, due - time.monotonic())] if due is not None else []
        return min(pauses, default=None)
