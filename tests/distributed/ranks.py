"""Real gloo processes for tests: started once, used by many, replaced when a test breaks them.

A test hands a top-level function ``fn(rank, *args)`` to :meth:`Ranks.run` and gets what each rank
returned, or an :class:`Outcome` with its exception.  Every run has a time limit; ranks that exceed
it are killed, and the test fails.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.free_port import free_port
from tests.limits import LIMIT, PATIENT

# Imported once, in the process that the ranks are forked from.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch.distributed", "commfuse_npu.ops"])


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: a value, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def set_up_process(rank: int, size: int, port: int) -> None:
    """Set the environment that torch.distributed reads, and one thread for torch."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        OMP_NUM_THREADS="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    import torch

    torch.set_num_threads(1)


class Gloo:
    """The communication backend of a rank; created by the parent, used in the rank's process."""

    backward_apart = True
    """Whether every backward runs in a second thread, as on a device."""

    def join(self, size: int) -> None:
        """Initialize the process group."""
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=PATIENT)


def _work(rank: int, size: int, port: int, pipe: Connection, backend: Gloo) -> None:
    set_up_process(rank, size, port)
    from commfuse_npu.runtime import agreement
    from tests.distributed import backward_thread

    if backend.backward_apart:
        backward_thread.install()
    backend.join(size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return  # the tests are over
        # A digest that an earlier run left on one rank only would block a step of this run.
        agreement._unchecked.clear()
        try:
            outcome = Outcome(value=function(rank, *args))
        except BaseException as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        try:
            pipe.send(outcome)
        except Exception as error:
            # The value or the exception cannot be pickled: send its text.
            text = f"{outcome.error or outcome.value!r}: {error}"
            pipe.send(Outcome(error=RuntimeError(text), trace=outcome.trace))


class Ranks:
    """A group of worker processes, ranks 0..size-1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def backend_of(self, rank: int) -> Gloo:
        """The backend for a rank that is about to start."""
        return Gloo()

    def _start(self) -> None:
        port = free_port()
        for rank in range(self.size):
            own_end, rank_end = _context.Pipe()
            work = rank, self.size, port, rank_end, self.backend_of(rank)
            process = _context.Process(target=_work, args=work)
            process.daemon = True
            process.start()
            rank_end.close()
            self._processes.append(process)
            self._pipes.append(own_end)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = LIMIT,
        may_die: bool = False,
        grace: float = 20.0,
    ) -> list[Outcome]:
        """Run ``function(rank, *args)`` on every rank and return the outcomes in rank order.

        After a rank fails, the others get ``grace`` seconds more: they may wait for it in a plain
        collective, whose timeout is long.

        A rank that dies fails the test; with ``may_die`` its outcome is an EOFError instead.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = {pipe: r for r, pipe in enumerate(self._pipes) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in [rank for pipe, rank in waiting.items() if pipe in ready]:
                try:
                    outcomes[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    if not may_die:
                        self.kill()
                        pytest.fail(f"rank {rank} of {self.size} died in {function.__name__}{args}")
                    outcomes[rank] = Outcome(error=EOFError())
                if outcomes[rank].error is not None:
                    end = min(end, time.monotonic() + grace)
        for rank in range(self.size):
            if rank not in outcomes:
                if not any(outcome.error for outcome in outcomes.values()):
                    self.kill()
                    pytest.fail(f"rank {rank} of {self.size} hangs in {function.__name__}{args}")
                outcomes[rank] = Outcome(error=TimeoutError("ended: another rank failed before"))
        if any(outcome.error is not None for outcome in outcomes.values()):
            # Transfers may still be pending; the next test gets new processes.
            self.kill()
        return [outcomes[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
        """As :meth:`outcomes`, but an exception on any rank fails the test."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        failed = [
            f"rank {rank} of {self.size}:\n{outcome.trace}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None
        ]
        if failed:
            pytest.fail("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def kill(self) -> None:
        """End these processes, and only these."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []


def on_ranks(many: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn ``test(rank, ...)``, which runs on every rank, into ``test(ranks, ...)`` for pytest.

    Args:
        many: the number of ranks; without it the test has a parameter ``size``.
    """

    def of(each: Callable[..., None]) -> Callable[..., None]:
        @wraps(each)
        def test(ranks: Callable[[int], Ranks], **given: Any) -> None:
            size = given.pop("size") if many is None else many
            ranks(size).run(_called, each.__module__, each.__name__, given)

        names = ["ranks", *signature(each).parameters]
        names[1:2] = ["size"] if many is None else []  # in the place of the rank
        parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return test

    return of


def _called(rank: int, module: str, name: str, given: dict[str, Any]) -> None:
    """Look the test up by name; the function to run is its ``__wrapped__``."""
    getattr(import_module(module), name).__wrapped__(rank, **given)
