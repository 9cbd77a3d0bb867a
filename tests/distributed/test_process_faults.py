"""A rank is killed, slow, cut off, out of memory or raises in the middle of an operation.

Every other rank ends with an error that names operation, step and peer.  If the faulty rank is only
slow, all results equal the plain form bit for bit.  No process is ended because another one ended:
a survivor notices the fault only by a lost connection or by its own timeout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.ops import all_gather_linear
from commfuse_npu.runtime.scratch import ScratchPool
from commfuse_npu.tools.measure.wire import connected_sockets
from tests.distributed.programs import watch_calls, watch_posts
from tests.distributed.ranks import open_store, set_up_process
from tests.limits import BRIEF, LIMIT, PATIENT
from tests.random_networks.case import (
    HEAD_FEATURES,
    WITH_PROJECTION,
    Bucket,
    BucketRun,
    Case,
    Layer,
    Network,
)
from tests.random_networks.compare import differences, run_case
from tests.random_networks.transports import transport_of

FAULTY = 1
AGAIN = 3
"""Runs with the fault: a rank that already has all its data notices it in the next run."""

LINEARS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_to_all")
ATTENTION = ("attention_linear_reduce_scatter", WITH_PROJECTION)
OPS = (*LINEARS, *ATTENTION, "bucket")


def case_of(op: str, size: int) -> Case:
    """Forward and backward of one op on two lanes, or two concurrent buckets."""
    cut = Schedule(lanes=2, chunks=2)
    if op == "bucket":
        return BucketRun(size, (Bucket(48), Bucket(48, gather=True)), schedule=cut, lanes=2)
    if op in LINEARS:
        layer = Layer(op, inputs=12, outputs=12, schedule=cut)
    else:
        layer = Layer(op, inputs=6 * HEAD_FEATURES, outputs=32, schedule=cut, mask="causal")
    return Network(size, (layer,), rows=8, batch=2, lanes=2)


class UserError(Exception):
    """An error of the user's program."""


def cut_connections() -> None:
    """Shut down all connections except the one to the store."""
    for sock in connected_sockets():
        # The peer may have closed it already because it lost another connection.
        with sock, contextlib.suppress(OSError):
            if int(os.environ["MASTER_PORT"]) not in (sock.getsockname()[1], sock.getpeername()[1]):
                sock.shutdown(socket.SHUT_RDWR)


def strike(kind: str) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "slow":
        time.sleep(BRIEF.total_seconds())
    elif kind == "too slow":
        time.sleep(4 * BRIEF.total_seconds())
    elif kind == "raises":
        raise UserError("a mistake in the program")
    elif kind == "out of memory":
        torch.empty(1 << 60, dtype=torch.uint8)  # the allocator's own error
    elif kind == "cut off":
        cut_connections()


class Plant:
    """Counts posts, or allocations of scratch arenas, and calls ``act`` before one of them.

    Attributes:
        at: the number of that post or allocation; reset to -1 once ``act`` was called.
    """

    def __init__(self, patch: pytest.MonkeyPatch, act: Callable[[], None], memory: bool) -> None:
        self.counted, self.at, self._act = 0, -1, act
        if memory:
            watch_calls(patch, ScratchPool, "take", lambda *_: self.count())
        else:
            watch_posts(patch, lambda *_: self.count())

    def count(self) -> None:
        now, self.counted = self.counted, self.counted + 1
        if now == self.at:
            self.at = -1
            self._act()


def meets(rank: int, kind: str, case: Case, place: float | None) -> list[str]:
    """Run the case with the fault in one run; returns the differences from the plain form.

    Args:
        place: position of the fault among the posts (or arenas) of forward and backward, from 0 to
            1; ``None``: before the ranks have compared the operation.
    """
    transport = transport_of(case)
    with pytest.MonkeyPatch.context() as patch:
        if rank == FAULTY:
            memory = kind == "out of memory"
            plant = Plant(patch, lambda: strike(kind), memory)
        if place is not None:
            plain = run_case(case, "plain")
            run_case(case, "fused")
        dist.barrier()
        if kind != "slow":
            transport.timeout = 2 * BRIEF
        if rank == FAULTY:
            if place is None:
                strike(kind)
            assert plant.counted > 0
            plant.at = plant.counted + round((place or 0.0) * (plant.counted - 1))
            transport.scratch.clear()
        wrong = []
        for _ in range(AGAIN):
            wrong += differences(run_case(case, "fused"), plain)
        assert rank != FAULTY or plant.at == -1, "the fault did not happen"
        return wrong


FORWARD, BACKWARD, FIRST, LAST = 0.25, 0.75, 0.0, 1.0
SHORT = [
    ("killed", "all_gather_linear", FORWARD, 3),
    ("killed", "linear_reduce_scatter", BACKWARD, 3),
    ("killed", "bucket", FORWARD, 3),
    ("killed", "all_gather_linear", None, 3),
    ("slow", "bucket", BACKWARD, 3),
    ("too slow", "linear_reduce_scatter", BACKWARD, 3),
    ("raises", "bucket", FORWARD, 3),
    ("cut off", "all_gather_linear", BACKWARD, 3),
    ("out of memory", "linear_reduce_scatter", FORWARD, 3),
    # The last allocation fails before the post that follows it.
    ("out of memory", "all_gather_linear", LAST, 3),
]
"""One case of each kind of fault, with different ops and places."""

KINDS = ("killed", "slow", "too slow", "raises", "cut off", "out of memory")
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
    outcomes = group.outcomes(meets, kind, case_of(op, many), place, may_die=True, timeout=120)
    for rank, outcome in enumerate(outcomes):
        if kind == "slow":
            assert outcome.value == [], outcome
        elif rank == FAULTY and kind == "killed":
            assert isinstance(outcome.error, BrokenProcessPool), outcome
        elif rank == FAULTY and kind == "raises":
            assert isinstance(outcome.error, UserError), outcome
        elif rank == FAULTY and kind == "out of memory":
            assert type(outcome.error) is RuntimeError, outcome
            assert "can't allocate memory" in str(outcome.error)
        else:
            assert isinstance(outcome.error, TransportError), outcome
            step = r"step \d+ of \d+, lane \d+|before step 0"
            for words in (rf"rank {rank} of {many} .*{op}", step, rf"peer (?!{rank})\d"):
                assert re.search(words, str(outcome.error)), outcome.error


def ends_by_itself(rank: int, port: int) -> None:
    set_up_process(rank, 2, port)
    dist.init_process_group("gloo", timeout=PATIENT)
    transport = Transport.create(timeout=timedelta(seconds=20))
    x, weight = torch.ones(4, 4), torch.ones(3, 4)
    all_gather_linear(x, weight, transport=transport)
    if rank == FAULTY:
        raise UserError("a mistake in the program")
    all_gather_linear(x, weight, transport=transport)


@pytest.mark.long
def test_processes_end_by_themselves(capfd: Any) -> None:
    """Spawned interpreters exit as usual, with the cleanup of torch."""
    context, store = multiprocessing.get_context("spawn"), open_store()
    given = [(rank, store.port) for rank in range(2)]
    processes = [context.Process(target=ends_by_itself, args=words) for words in given]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT)
        assert [process.exitcode for process in processes] == [1, 1]
    finally:
        for process in processes:
            process.kill()
    stderr = capfd.readouterr().err
    assert "UserError: a mistake in the program" in stderr
    assert re.search(r"TransportError: rank 0 of 2 .*all_gather_linear.*peer 1", stderr)
