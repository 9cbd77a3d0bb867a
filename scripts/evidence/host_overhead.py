"""What a transfer of a plan costs the host.

Each transfer is a step of Python: views are made, a receive and a send are posted, both are waited
for, the piece is handed on.  With pieces of a few kilobytes next to nothing else is left.  Measured
is the CPU time of the thread that runs the op, gloo's calls included and its own threads not; what
an op costs whatever the number of its transfers is taken off, by the difference between many and
few.

On HCCL the calls are others (a batch per step, waits that hold the stream): the Python around them
is the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from scripts.gloo_ranks import run_ranks

__all__ = ["Overhead", "main", "measure"]

_ROWS, _FEATURES = 256, 16
_FEW, _MANY = 1, 16


@dataclass(frozen=True)
class Overhead:
    """Of one op on one rank, in microseconds of the calling thread's CPU time.

    Attributes:
        op_us: of a call with one transfer per peer.
        transfer_us: of each transfer more.
    """

    op: str
    op_us: float
    transfer_us: float


def measure(transport: Transport, calls: int) -> list[Overhead]:
    """Medians over ``calls`` calls of each op.  A collective of the group."""
    size = transport.size
    weight = torch.ones(_FEATURES, _FEATURES)
    inputs = {
        all_gather_linear: torch.ones(_ROWS, _FEATURES),
        linear_reduce_scatter: torch.ones(size * _ROWS, _FEATURES),
    }
    found = []
    for op, x in inputs.items():
        medians = {}
        for chunks in (_FEW, _MANY):
            options = LinearOptions(Schedule(lanes=transport.lanes, chunks=chunks))
            times = []
            for _ in range(calls + 10):
                start = time.thread_time()
                op(x, weight, transport=transport, options=options)
                times.append(time.thread_time() - start)
            medians[chunks] = 1e6 * statistics.median(times[10:])
        more = (_MANY - _FEW) * (size - 1)
        found.append(Overhead(op.__name__, medians[_FEW], (medians[_MANY] - medians[_FEW]) / more))
    return found


def _rank(rank: int, calls: int) -> None:
    size = dist.get_world_size()
    transport = Transport.create(lanes=max(1, size - 1), timeout=timedelta(seconds=60))
    with torch.no_grad():
        found = measure(transport, calls)
    if rank == 0:
        print(f"{size} ranks, gloo, medians of {calls} calls, us of CPU time of the calling thread")
        for overhead in found:
            print(
                f"{overhead.op}: {overhead.op_us:.0f} for a call with {size - 1} transfers, "
                f"{overhead.transfer_us:.0f} for each one more"
            )
    dist.barrier()
    transport.close()


def main(argv: Sequence[str]) -> int:
    """Start the ranks and print a line per op."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9), metavar="2..8")
    parser.add_argument("--calls", type=int, default=300, help="per op; default %(default)s")
    given = parser.parse_args(argv)
    if given.calls < 1:
        parser.error(f"--calls is {given.calls}; give a whole number from 1")
    return run_ranks(_rank, given.ranks, given.calls)
