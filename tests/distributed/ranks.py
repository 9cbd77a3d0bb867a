"""Real gloo processes for tests: started once, used by many, replaced when a test breaks them.

A test hands a top-level function ``fn(rank, *args)`` to :meth:`Ranks.run` and gets what each rank
returned.  Every run has a time limit; ranks that exceed it are killed, and the test fails.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any

import pytest
import torch.distributed as dist

from commfuse_npu.runtime.child_process import die_with_parent
from tests.limits import LIMIT, PATIENT
from tests.processes import kill_workers

# Imported once, in the process that the ranks are forked from.
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["pytest", "torch.distributed", "commfuse_npu.ops"])


def _join(rank: int, size: int, port: int) -> None:
    """Initialize the process group; every backward runs in a second thread, as on a device."""
    die_with_parent()
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

    from tests.distributed import backward_thread

    torch.set_num_threads(1)
    backward_thread.install()
    dist.init_process_group("gloo", timeout=PATIENT)


def _work(function: Callable[..., Any], rank: int, *args: Any) -> Any:
    from commfuse_npu.runtime import agreement

    # A digest or a failure that an earlier run left on this rank would block a step of this run.
    agreement._unsettled.clear()
    return function(rank, *args)


class Ranks:
    """A group of worker processes, ranks 0..size-1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pools: list[ProcessPoolExecutor] = []  # one process each

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = LIMIT,
        grace: float = 20.0,
    ) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank; returns its result, or its exception, in
        rank order.  A rank that died has a ``BrokenProcessPool``.

        After a rank fails, the others get ``grace`` seconds more: they may wait for it in a plain
        collective, whose timeout is long.
        """
        if not self._pools:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            places = [(rank, self.size, self._store.port) for rank in range(self.size)]
            self._pools = [ProcessPoolExecutor(1, forkserver, _join, place) for place in places]
        futures = [p.submit(_work, function, rank, *args) for rank, p in enumerate(self._pools)]
        if pending := wait_for(futures, timeout, FIRST_EXCEPTION).not_done:
            if not any(future.done() and future.exception() for future in futures):
                self.kill()
                rank = futures.index(pending.pop())
                pytest.fail(f"rank {rank} of {self.size} hangs in {function.__name__}{args}")
            wait_for(pending, grace)
        outcomes = [_outcome(future) for future in futures]
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            # Transfers may still be pending; the next test gets new processes.
            self.kill()
        return outcomes

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LIMIT) -> list[Any]:
        """As :meth:`outcomes`, but an exception on any rank fails the test."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        failed = [
            f"rank {rank} of {self.size} in {function.__name__}{args}:\n"
            + "".join(traceback.format_exception(outcome))
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, BaseException)
        ]
        if failed:
            pytest.fail("\n".join(failed))
        return outcomes

    def kill(self) -> None:
        """End these processes, and only these."""
        for pool in self._pools:
            kill_workers(pool)
        self._pools = []


def _outcome(future: Future[Any]) -> Any:
    if not future.done():
        return TimeoutError("ended: another rank failed before")
    return future.exception() or future.result()


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
