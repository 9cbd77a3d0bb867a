"""The ranks: processes that are started here, asked, and ended whatever happens.

The process that starts them does not need torch.  A rank waits at its end of a pipe for the name
of a method of its worker and its arguments.  It leaves Ctrl-C to its parent, and the kernel ends it
when its parent dies (Linux).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from commfuse_npu.tools.bench import namespaces

__all__ = ["Ranks", "RanksError", "die_with_parent"]

_START_SECONDS = 180.0
_PR_SET_PDEATHSIG = 1
_BACKENDS = {"cpu": "gloo", "npu": "hccl", "cuda": "nccl"}
_context = multiprocessing.get_context("spawn")


class RanksError(RuntimeError):
    """A rank failed, died or did not answer; all have been ended."""


class Ranks:
    """Processes of ranks 0..size-1, one thread each.  Use it in a ``with`` block.

    With at least as many cores as ranks each is pinned to a core: gloo's threads then share the
    core of their rank and not the neighbour's.

    Args:
        size: how many.
        device: ``cpu`` (gloo over 127.0.0.1 or the namespaces' cards), ``npu`` (HCCL) or ``cuda``
            (NCCL; both read, not run).
        timeout: seconds for an answer, and for a transfer.  For answers it may be set anew.
        names: the network namespaces of the ranks, if they have any.
        worker: the class whose methods are asked for, ``module:name``; it takes no arguments.
        one_device: all of them on the first device, to run one alone
            (:mod:`commfuse_npu.tools.one_device`).

    Raises:
        RanksError: they could not be started.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str,
        timeout: float,
        names: Sequence[str] | None = None,
        worker: str = "commfuse_npu.tools.bench.worker:Worker",
        one_device: bool = False,
    ) -> None:
        self._worker = worker
        self._one_device = one_device
        self.size = size
        self.timeout = timeout
        self._device = device
        self._names = names
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def __enter__(self) -> Ranks:
        # A store in a file: ranks in different namespaces have no address in common before.
        self._folder = tempfile.mkdtemp(prefix="commfuse-bench-")
        try:
            for rank in range(self.size):
                ours, theirs = _context.Pipe()
                start = {
                    "rank": rank,
                    "size": self.size,
                    "store": str(Path(self._folder) / "store"),
                    "device": self._device,
                    "namespace": self._names[rank] if self._names else None,
                    "timeout": self.timeout,
                    "worker": self._worker,
                    "one_device": self._one_device,
                }
                process = _context.Process(target=_serve, args=(theirs, start), daemon=True)
                process.start()
                self._processes.append(process)
                self._pipes.append(ours)
                theirs.close()
            self._answers("starting", _START_SECONDS, range(self.size))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def ask(self, method: str, *args: Any, **flags: Any) -> list[Any]:
        """Call a method on every rank.

        Returns:
            what it returned, by rank.

        Raises:
            RanksError: a rank raised, died, or took longer than the time limit.
        """
        return self._ask(range(self.size), method, args, flags)

    def ask_first(self, method: str, *args: Any, **flags: Any) -> Any:
        """Call a method on rank 0 alone; the others wait for what comes next.

        Raises:
            RanksError: as :meth:`ask`; also when one of the others dies.
        """
        return self._ask([0], method, args, flags)[0]

    def _ask(
        self, of: Sequence[int], method: str, args: tuple[Any, ...], flags: dict[str, Any]
    ) -> list[Any]:
        try:
            for rank in of:
                self._pipes[rank].send((method, args, flags))
            return self._answers(method, self.timeout, of)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RanksError(f"a rank is gone before {method}: {error}") from error
            raise

    def _answers(self, method: str, timeout: float, of: Sequence[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        # Whoever is not asked has nothing to say and may be gone all the same.
        others = {self._processes[rank].sentinel: rank for rank in {*range(self.size)} - {*of}}
        end = time.monotonic() + timeout
        while len(answers) < len(of):
            waiting = {self._pipes[rank]: rank for rank in of if rank not in answers}
            ready = wait([*waiting, *others], max(0.0, end - time.monotonic()))
            if not ready:
                missing = ", ".join(str(rank) for rank in waiting.values())
                raise RanksError(
                    f"no answer from rank {missing} of {self.size} to {method} within "
                    f"{timeout:.0f} s; give more with --timeout, or a smaller --scale"
                )
            for pipe in ready:
                if not isinstance(pipe, Connection):
                    assert isinstance(pipe, int)
                    raise RanksError(f"rank {others[pipe]} of {self.size} died during {method}")
                rank = waiting[pipe]
                try:
                    worked, value = pipe.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise RanksError(f"rank {rank} of {self.size} died in {method}") from error
                if not worked:
                    raise RanksError(f"rank {rank} of {self.size} failed in {method}:\n{value}")
                answers[rank] = value
        return [answers[rank] for rank in of]

    def close(self) -> None:
        """End these processes, and only these."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone (Linux)."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died in between


def _serve(pipe: Connection, start: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        worker = _join(**start)
        pipe.send((True, None))
        while True:
            method, args, flags = pipe.recv()
            pipe.send((True, getattr(worker, method)(*args, **flags)))
    except EOFError:
        return  # the parent closed its end
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _join(
    rank: int,
    size: int,
    store: str,
    device: str,
    namespace: str | None,
    timeout: float,
    worker: str,
    one_device: bool,
) -> Any:
    # Before torch makes threads and sockets.
    card = "lo" if sys.platform.startswith("linux") else "lo0"
    if namespace is not None:
        namespaces.enter(namespace)
        card = namespaces.CARD
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) >= size and not one_device:
        os.sched_setaffinity(0, {cores[rank]})
    os.environ.update(
        OMP_NUM_THREADS="1",
        KINETO_LOG_LEVEL="99",  # the profiler that counts memory tells of every start and stop
        GLOO_SOCKET_IFNAME=card,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
    )
    if one_device and device == "cuda":
        # As many queues as there can be: streams of one queue would wait for each other.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    if device == "cpu":
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what a sleeping GEMM leaves may be any number
    if device != "cpu":
        # Read, not run.
        if device == "npu":
            import torch_npu  # noqa: F401

        module = getattr(torch, device)
        found, needed = module.device_count(), 1 if one_device else size
        if found < needed:
            raise RuntimeError(
                f"--device {device} with {size} ranks takes {needed} of them, torch "
                f"{torch.__version__} finds {found}; choose another device, or fewer ranks"
            )
        module.set_device(0 if one_device else rank)
    backend = _BACKENDS[device]
    if one_device:
        from commfuse_npu.tools.one_device.backend import BACKEND, register

        register(device)
        backend = BACKEND
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    module, name = worker.split(":")
    return getattr(import_module(module), name)()
