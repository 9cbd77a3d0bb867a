"""Real gloo processes for tests: started once, used by many, replaced when a test breaks them.

A test hands a top-level function ``fn(rank, *args)`` to :meth:`Ranks.run` and gets what each rank
returned, or an :class:`Outcome` with its exception.  Every run has a time limit; ranks that exceed
it are killed, and the test fails.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any

import pytest
import torch.distributed as dist

from commfuse_npu.runtime.child_process import die_with_parent
from tests.limits import LIMIT, PATIENT
from tests.worker import Worker

# Imported once, in the process that the ranks are forked from.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["pytest", "torch.distributed", "commfuse_npu.ops"])


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: a value, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None

    @property
    def trace(self) -> str:
        """The traceback in the rank's process."""
        return "".join(traceback.format_exception(self.error)) if self.error else ""


def open_store() -> dist.TCPStore:
    """The store in which the ranks of a group meet, on a free port; it lives in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def set_up_process(rank: int, size: int, port: int) -> None:
    """Set the environment that torch.distributed reads, and one thread for torch."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        # The store is another process's, as under torchrun.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    import torch

    torch.set_num_threads(1)


def _join(rank: int, size: int, port: int) -> None:
    """Initialize the process group; every backward runs in a second thread, as on a device."""
    from tests.distributed import backward_thread

    die_with_parent()
    set_up_process(rank, size, port)
    backward_thread.install()
    dist.init_process_group("gloo", timeout=PATIENT)


def _work(function: Callable[..., Any], rank: int, *args: Any) -> Any:
    from commfuse_npu.runtime import agreement

    # A digest that an earlier run left on one rank only would block a step of this run.
    agreement._unchecked.clear()
    return function(rank, *args)


class Ranks:
    """A group of worker processes, ranks 0..size-1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Worker] = []

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

        A rank that dies fails the test; with ``may_die`` its outcome is a BrokenProcessPool
        instead.
        """
        if not self._workers:
            self._store = open_store()
            given = self.size, self._store.port
            self._workers = [Worker(forkserver, _join, rank, *given) for rank in range(self.size)]
        futures = [w.submit(_work, function, rank, *args) for rank, w in enumerate(self._workers)]
        if pending := wait_for(futures, timeout, FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                wait_for(pending, grace)
            else:
                self._fail(futures.index(pending.pop()), f"hangs in {function.__name__}{args}")
        outcomes = [_outcome(future) for future in futures]
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome.error, BrokenProcessPool) and not may_die:
                self._fail(rank, f"died in {function.__name__}{args}")
        if any(outcome.error is not None for outcome in outcomes):
            # Transfers may still be pending; the next test gets new processes.
            self.kill()
        return outcomes

    def _fail(self, rank: int, how: str) -> None:
        self.kill()
        pytest.fail(f"rank {rank} of {self.size} {how}")

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
        for worker in self._workers:
            worker.kill()
        self._workers = []


def _outcome(future: Future[Any]) -> Outcome:
    if not future.done():
        return Outcome(error=TimeoutError("ended: another rank failed before"))
    return Outcome(error=error) if (error := future.exception()) else Outcome(future.result())


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
