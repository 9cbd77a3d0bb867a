"""Rank processes: started here, called by name, and ended in any case.

The process that starts them does not need torch.  A rank waits on a pipe for the name of a method
of its worker and its arguments.  It leaves Ctrl-C to its parent, and the kernel ends it when its
parent dies (Linux).
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.child_process import die_with_parent

_END_SECONDS = 5.0
_BACKENDS = {"cpu": "gloo", "npu": "hccl"}
_context = multiprocessing.get_context("spawn")


class RanksError(RuntimeError):
    """A rank failed, died or did not answer; all ranks have been ended."""


class Ranks(AbstractContextManager["Ranks"]):
    """Processes of ranks 0..size-1, one thread each; a context manager that ends them.

    If there are at least as many cores as ranks, each rank is pinned to a core: gloo's threads then
    share the core of their own rank, not of a neighbor.

    Args:
        size: number of ranks.
        device: ``cpu`` (gloo over 127.0.0.1), or ``npu`` (HCCL; read, not run).
        timeout: seconds to start, for an answer, and for a transfer.  That of answers can be
            changed later.
        option: of the command, which gives that time.
        worker: the class whose methods are called, ``module:name``; it takes no arguments.

    Raises:
        RanksError: they could not be started.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str,
        timeout: float,
        option: str = "--timeout",
        worker: str = "commfuse_npu.tools.measure.measuring_worker:Worker",
    ) -> None:
        self.size = size
        self.timeout = timeout
        self._option = option
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        # Named before it exists, so that a signal at any moment leaves no folder behind.
        self._folder = Path(tempfile.gettempdir(), f"commfuse-ranks-{secrets.token_hex(8)}")
        store = str(self._folder / "store")
        try:
            os.mkdir(self._folder, 0o700)
            for rank in range(size):
                ours, remote = _context.Pipe()
                arguments = remote, rank, size, store, device, timeout, worker
                process = _context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                self._processes.append(process)
                self._pipes.append(ours)
                remote.close()
            self._answers("starting")
        except BaseException:
            self.close()
            raise

    def __exit__(self, *what: object) -> None:
        self.close()

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank; returns the answers by rank.

        Raises:
            RanksError: a rank raised, died, or exceeded the time limit.
        """
        try:
            for pipe in self._pipes:
                pipe.send((method, args))
            return self._answers(method)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RanksError(f"a rank is gone before {method}: {error}") from error
            raise

    def _answers(self, method: str) -> list[Any]:
        answers: dict[int, Any] = {}
        end = time.monotonic() + self.timeout
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, waiting.values()))
                raise RanksError(
                    f"no answer from rank {missing} of {self.size} to {method} within "
                    f"{self.timeout:.0f} s; give more with {self._option}"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                name = f"rank {rank} of {self.size}"
                try:
                    worked, answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError) as error:
                    self._processes[rank].join(_END_SECONDS)
                    code = self._processes[rank].exitcode
                    how = "still ending" if code is None else f"exit code {code}"
                    if code is not None and code < 0:
                        how = f"by {signal.Signals(-code).name}"
                    raise RanksError(f"{name} died in {method}, {how}") from error
                if not worked:
                    raise RanksError(f"{name} failed in {method}:\n{answers[rank]}")
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End these processes, and only these."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []
        shutil.rmtree(self._folder, ignore_errors=True)


def check_backend(device: str) -> None:
    """Raise a ModuleNotFoundError if ranks cannot run on a device."""
    for name in ("torch", "torch_npu") if device == "npu" else ("torch",):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _serve(pipe: Connection, *where: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        worker = _join(*where)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            pipe.send((True, getattr(worker, method)(*args)))
    except EOFError:
        return  # the parent closed its end
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _join(rank: int, size: int, store: str, device: str, timeout: float, worker: str) -> Any:
    # Before torch creates threads and sockets.
    card = "lo" if sys.platform.startswith("linux") else "lo0"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= size:
        os.sched_setaffinity(0, {cores[rank]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=card)
    if device == "cpu":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device != "cpu":
        # Read, not run.
        import torch_npu  # noqa: F401

        module = getattr(torch, device)
        count = module.device_count()
        if count < size:
            raise RuntimeError(
                f"--device {device} with {size} ranks takes {size} of them, torch "
                f"{torch.__version__} finds {count}; choose another device, or fewer ranks"
            )
        module.set_device(rank)
    dist.init_process_group(
        _BACKENDS[device],
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    module, name = worker.split(":")
    return getattr(import_module(module), name)()
