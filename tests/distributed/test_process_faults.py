"""A rank is killed, slow, cut off, out of memory or raises in the middle of an operation.

Every other rank ends with an error that names operation, step and peer.  If the faulty rank is only
slow, all results equal the plain form bit for bit.  No process is ended because another one ended:
a survivor notices the fault only by a lost connection or by its own timeout.
"""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, TransportError
from commfuse_npu.runtime.scratch import ScratchPool
from scripts.cpu_pretraining.wire import connected_sockets
from tests.distributed.programs import transport, watch_calls, watch_posts
from tests.limits import BRIEF
from tests.random_networks.case import WITH_PROJECTION, Bucket, BucketRun, Case, one_layer
from tests.random_networks.compare import differences, quiet, run_case
from tests.random_networks.values import round_once

FAULTY = 1
AGAIN = 3
"""Runs with the fault: a rank that already has all its data notices it in the next run."""

OPS = (
    *("all_gather_linear", "linear_reduce_scatter", "linear_all_to_all"),
    *("attention_linear_reduce_scatter", WITH_PROJECTION, "bucket"),
)


def case_of(op: str, size: int) -> Case:
    """Forward and backward of one op on two lanes, or two concurrent buckets."""
    if op != "bucket":
        return one_layer(op, size)
    schedule = Schedule(lanes=2, chunks=2)
    return BucketRun(size, (Bucket(48), Bucket(48, gather=True)), schedule=schedule)


def cut_connections() -> None:
    """Shut down all connections except the one to the store."""
    for sock in connected_sockets():
        # The peer may have closed it already because it lost another connection.
        with sock, contextlib.suppress(OSError):
            if int(os.environ["MASTER_PORT"]) not in (sock.getsockname()[1], sock.getpeername()[1]):
                sock.shutdown(socket.SHUT_RDWR)


OWN = {"killed": BrokenProcessPool, "raises": LookupError, "out of memory": RuntimeError}
"""The exception of the faulty rank itself."""

KINDS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "slow": lambda: time.sleep(BRIEF.total_seconds()),
    "too slow": lambda: time.sleep(4 * BRIEF.total_seconds()),
    "raises": Mock(side_effect=LookupError("a mistake in the program")),
    "cut off": cut_connections,
    # The allocator's own error.
    "out of memory": lambda: torch.empty(1 << 60, dtype=torch.uint8),
}


def meets(rank: int, kind: str, case: Case, place: float | None) -> list[str]:
    """Run the case with the fault in one run; returns the differences from the plain form.

    Args:
        place: position of the fault among the posts (or, out of memory, the scratch arenas) of
            forward and backward, from 0 to 1; ``None``: before the ranks have compared the
            operation.
    """
    link, counted, at = transport(case.lanes), 0, -1

    def count(*_: object) -> None:
        nonlocal counted, at
        counted += 1
        if counted == at:
            at = -1
            KINDS[kind]()

    with quiet(), round_once(), pytest.MonkeyPatch.context() as patch:
        if rank == FAULTY and kind == "out of memory":
            watch_calls(patch, ScratchPool, "take", count)
        elif rank == FAULTY:
            watch_posts(patch, count)
        if place is not None:
            plain = run_case(case, "plain")
            run_case(case, "fused")
        dist.barrier()
        if kind != "slow":
            link.timeout = 2 * BRIEF
        if rank == FAULTY:
            if place is None:
                KINDS[kind]()
            assert counted > 0
            at = counted + 1 + round((place or 0.0) * (counted - 1))
            link.scratch.clear()
        wrong = [line for _ in range(AGAIN) for line in differences(run_case(case, "fused"), plain)]
        assert at == -1, "the fault did not happen"
        return wrong


FORWARD, BACKWARD, FIRST, LAST = 0.25, 0.75, 0.0, 1.0
SHORT = [
    ("killed", "all_gather_linear", FORWARD, 3),
    ("killed", "all_gather_linear", None, 3),
    ("slow", "bucket", BACKWARD, 3),
    ("too slow", "linear_reduce_scatter", BACKWARD, 3),
    ("raises", "bucket", FORWARD, 3),
    ("cut off", "all_gather_linear", BACKWARD, 3),
    # The last allocation fails before the post that follows it.
    ("out of memory", "all_gather_linear", LAST, 3),
]
"""One case of each kind of fault, with different ops and places."""

LONG = [
    *((kind, op, (FORWARD, BACKWARD)[at % 2], 3) for kind in KINDS for at, op in enumerate(OPS)),
    ("killed", "attention_linear_reduce_scatter", FIRST, 4),
    ("killed", "attention_linear_reduce_scatter", LAST, 2),
]


@pytest.mark.parametrize(
    ("kind", "op", "place", "many"),
    [
        *SHORT,
        *(pytest.param(*row, marks=pytest.mark.long) for row in LONG if row not in SHORT),
    ],
)
def test_the_others_say_what_they_waited_for(
    ranks, kind: str, op: str, place: float | None, many: int
) -> None:
    group = ranks(many)
    group.kill()
    # The group's own timeout is longer: a wait that ignores the transport's would hang.
    outcomes = group.outcomes(meets, kind, case_of(op, many), place, timeout=120)
    for rank, outcome in enumerate(outcomes):
        if kind == "slow":
            assert outcome == [], outcome
        elif rank == FAULTY and kind in OWN:
            assert type(outcome) is OWN[kind], outcome
        else:
            assert isinstance(outcome, TransportError), outcome
            step = r"step \d+ of \d+, lane \d+|before step 0"
            for words in (rf"rank {rank} of {many} .*{op}", step, rf"peer (?!{rank})\d"):
                assert re.search(words, str(outcome)), outcome
