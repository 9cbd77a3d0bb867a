"""What a process holds on to: memory, sockets, threads, objects, transfers (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from commfuse_npu.plan.rules import RULES
from commfuse_npu.runtime.executor import Running, _flat
from commfuse_npu.runtime.transport import Transport

__all__ = ["ProcessState", "process_state"]

_SELF = Path("/proc/self")


@dataclass(frozen=True)
class ProcessState:
    """Taken when nothing should be under way, after a collection of garbage.

    Compiled programs, of which 4,096 of each rule are kept, are forgotten before.

    Attributes:
        iteration: how many are done.
        rss_kib: resident memory, with what the allocator could give back given back.
        sockets, threads: open ones, of the whole process.
        in_flight: programs that the transport says are under way.
        handles: posted transfers and programs that something still refers to.
        lent: parts of buffers that were not given back to the pool.
        idle_kib: what the pool of buffers keeps.
        tensors: that Python refers to, without those that the pool keeps.
        agreed: combinations of operation, shape and options that the transport remembers.
        objects: that the garbage collector watches.
    """

    iteration: int
    rss_kib: int
    sockets: int
    threads: int
    in_flight: int
    handles: int
    lent: int
    idle_kib: int
    tensors: int
    agreed: int
    objects: int


def process_state(iteration: int, transport: Transport) -> ProcessState:
    """Of this process, and of one of its transports."""
    _forget_programs(transport)
    gc.collect()
    _give_memory_back()
    objects = gc.get_objects()
    kinds = [type(one) for one in objects]
    return ProcessState(
        iteration,
        rss_kib=_rss_kib(),
        sockets=_sockets(),
        threads=len(os.listdir(_SELF / "task")),
        in_flight=len(transport._in_flight),
        handles=kinds.count(Running),
        lent=transport.scratch.lent,
        idle_kib=transport.scratch.idle_bytes >> 10,
        tensors=sum(issubclass(kind, torch.Tensor) for kind in kinds) - transport.scratch.tensors,
        agreed=len(transport._agreed),
        objects=len(objects),
    )


def _forget_programs(transport: Transport) -> None:
    for rule in RULES.values():
        rule.cache_clear()
    _flat.cache_clear()
    transport._begun.clear()


def _give_memory_back() -> None:
    """Freed memory that the allocator keeps is no leak.  Of glibc; elsewhere nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _rss_kib() -> int:
    for line in (_SELF / "status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise RuntimeError(f"{_SELF / 'status'} says no VmRSS; this needs Linux")


def _sockets() -> int:
    found = 0
    for link in os.listdir(_SELF / "fd"):
        try:
            found += os.readlink(_SELF / "fd" / link).startswith("socket:")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found
