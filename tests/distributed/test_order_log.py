"""Recorded runs of real ranks are proved; a log with a fault planted in it is refuted by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.ops import BucketOptions, Buckets, LinearOptions, all_gather_linear
from commfuse_npu.proof.verify_log import verify_logs
from commfuse_npu.runtime import order_log
from commfuse_npu.runtime.order_log import OrderLog
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import ATTENTION, one_layer
from tests.random_networks.network_run import run_network

Programme = Callable[[int, OrderLog, bool], list[Transport]]
"""``programme(rank, log, batched)``; returns the transports that it made."""

WAYS = pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])


def link(log: OrderLog, batched: bool, group: Any = None) -> Transport:
    return Transport.create(group, lanes=3, timeout=PATIENT, batched=batched, order_log=log)


def record(rank: int, folder: str, programme: Programme, batched: bool) -> None:
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    for transport in programme(rank, log, batched):
        transport.close()
    log.close()


def layer(made: Transport, op: str, schedule: Schedule) -> None:
    run_network(one_layer(op, made.size, schedule=schedule), "fused", made)


def layers(rank: int, log: OrderLog, batched: bool, *, ops: tuple[str, ...], turns: int = 1) -> Any:
    """Of linear layers, backwards with a re-gather and a reduce-scatter under way at once."""
    made = link(log, batched)
    schedules = [Schedule("shifted", 2, 2), Schedule("shifted", 1, 4, taper=2.0)]
    if made.size % 2 == 0:
        schedules.append(Schedule("two_level", 2, 2, node_size=2))
    for schedule, op in list(product(schedules, ops)) * turns:
        layer(made, op, schedule)
    return [made]


LINEARS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce")
linears = partial(layers, ops=LINEARS, turns=3)
others = partial(layers, ops=(*ATTENTION, "linear_all_to_all", "all_to_all_linear"))


def buckets(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """With room for one piece only, and the ranks wait in different orders."""
    made = link(log, batched)
    options = BucketOptions(Schedule(lanes=3, chunks=3), scratch_bytes=0, last_first=True)
    exchange = Buckets(made, options)
    for turn in range(3):
        flat = [torch.full((made.size * 10,), float(rank)) for _ in range(4)]
        handles = [
            exchange.reduce_scatter(flat[0]),
            exchange.all_gather(flat[1]),
            exchange.reduce_scatter(flat[2]),
        ]
        if (rank + turn) % 2:
            handles[1].wait()
        handles.append(exchange.all_gather(flat[3]))
        for handle in handles if rank == 0 else handles[::-1]:
            handle.wait()
    return [made]


def several_groups(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Tensor-parallel pairs, and pairs of replicas with two transports, all under way at once."""
    pairs = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    mine = [group for ranks, group in pairs.items() if rank in ranks]
    tensor, gradients, parameters = (
        link(log, batched, group) for group in (mine[0], mine[1], mine[1])
    )
    options = BucketOptions(Schedule(lanes=1))
    out, back = Buckets(gradients, options), Buckets(parameters, options)
    for _ in range(3):
        first = out.reduce_scatter(torch.ones(8))
        layer(tensor, "all_gather_linear", Schedule(chunks=2))
        second = back.all_gather(torch.ones(8))
        if rank < 2:
            first.wait()
        layer(tensor, "all_gather_linear", Schedule(chunks=2))
        first.wait()
        tensor.confirm("the step")
        second.wait()
    return [tensor, gradients, parameters]


@WAYS
@pytest.mark.parametrize(
    ("size", "programme", "operations"),
    [
        *((size, others, 8) for size in (2, 3)),
        *((size, buckets, 12) for size in (2, 3, 4)),
        # Two layers, forward and backward, and two buckets, three times.
        (4, several_groups, 3 * (2 * 2 + 2)),
    ],
)
def test_recorded_runs_are_proved(
    ranks, tmp_path, programme, size: int, operations: int, batched: bool
) -> None:
    ranks(size).run(record, str(tmp_path), programme, batched)
    found = verify_logs([tmp_path])
    assert (found.faults, found.notes) == ([], [])
    assert found.operations >= operations * size
    assert found.messages > 0


def gather(made: Transport) -> torch.Tensor:
    shard, options = torch.full((1, 2), float(made.rank)), LinearOptions(Schedule(lanes=2))
    return all_gather_linear(shard, torch.eye(2), transport=made, options=options)


def hangs(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Rank 1 leaves an operation out, and the other one fails in its wait."""
    made = link(log, batched)
    gather(made)
    if rank == 1:
        made.order_log = None
        return [made]
    made.timeout = BRIEF
    with pytest.raises(TransportError):
        gather(made)
    return [made]


def test_a_run_that_failed_says_who_waits_for_whom(ranks, tmp_path) -> None:
    ranks(2).run(record, str(tmp_path), hangs, False)
    found = verify_logs([tmp_path])
    assert any("a transport of rank 0 broke" in note for note in found.notes)
    assert re.search("deadlock .*rank 0 waits .*rank 1 has nothing more to do", found.faults[0])
    assert "rank 1 lacks operation 1 (all_gather_linear)" in "".join(found.faults)


# ---------------------------------------------------------------------- the recorder


def unwritable_later(rank: int, folder: str) -> list[list[float]]:
    """A disk that is full from the second line on."""
    path = Path(folder) / f"rank_{rank:05d}.jsonl"
    path.symlink_to("/dev/full")
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    made = link(log, False)
    got = gather(made)
    made.close()
    log.close()
    return got.tolist()


def test_a_full_disk_ends_the_recording_and_not_the_job(ranks, tmp_path) -> None:
    assert ranks(2).run(unwritable_later, str(tmp_path)) == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def little_memory(rank: int, folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_log, "_MOST_DEFINED", 4)
        record(rank, folder, linears, False)
    text = (Path(folder) / f"rank_{rank:05d}.jsonl").read_text()
    return text.count('["forget"]')


def test_what_is_remembered_stays_within_bounds(ranks, tmp_path) -> None:
    assert min(ranks(2).run(little_memory, str(tmp_path))) > 3
    found = verify_logs([tmp_path])
    assert (found.faults, found.notes) == ([], [])
