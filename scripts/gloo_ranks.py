"""Gloo processes of this machine for a measurement: each runs one function and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from scripts.free_port import free_port

__all__ = ["run_ranks"]


def run_ranks(work: Callable[..., int | None], size: int, *args: Any) -> int:
    """Run ``work(rank, *args)`` in ``size`` processes with a process group and a thread each.

    Returns:
        The exit code that the work of a rank returned; 0 if none did.

    Raises:
        ProcessException: a rank raised; with its traceback.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        spawn(_rank, (work, size, free_port(), args), nprocs=size)
    except ProcessExitedException as error:
        if error.signal_name is not None:
            raise
        return int(error.exit_code)
    return 0


def _rank(
    rank: int, work: Callable[..., int | None], size: int, port: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=2),
    )
    code = work(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    # All is said and written.  An ordinary end lets the destructors of torch's libraries run, and
    # about one in ten aborts there ("terminate called without an active exception"; torch 2.13).
    sys.stdout.flush()
    os._exit(code or 0)
