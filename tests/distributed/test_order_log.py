"""Order logs of real ranks are proved correct; for a run that hangs the fault is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.ops import Buckets, LinearOptions, all_gather_linear
from commfuse_npu.proof.verify_log import verify_logs
from commfuse_npu.runtime.order_log import OrderLog
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import Case, one_layer
from tests.random_networks.compare import quiet, run_case
from tests.random_networks.network_run import run_network
from tests.random_networks.strategy import cases

Programme = Callable[..., list[Transport]]
"""``programme(rank, log, batched)`` returns the transports that it created."""


def link(log: OrderLog, batched: bool, group: Any = None) -> Transport:
    return Transport.create(group, lanes=3, timeout=PATIENT, batched=batched, order_log=log)


def record(rank: int, folder: str, programme: Programme, *given: Any) -> None:
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    for transport in programme(rank, log, *given):
        transport.close()
    log.close()


def drawn(size: int, many: int) -> list[Case]:
    """Random networks and buckets; every rank waits for the buckets in its own order."""
    examples: list[Case] = []

    @settings(
        max_examples=many,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # of the speed of the machine
    )
    @given(case=cases(size))
    def keep(case: Case) -> None:
        examples.append(case)

    keep()
    return examples


def of_cases(rank: int, log: OrderLog, batched: bool, cases: list[Case]) -> list[Transport]:
    transport = link(log, batched)
    with quiet():
        for case in cases:
            run_case(case, "fused", transport)
    return [transport]


def layer(made: Transport) -> None:
    case = one_layer("all_gather_linear", made.size, schedule=Schedule(chunks=2))
    run_network(case, "fused", made)


def several_groups(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Tensor-parallel pairs, and pairs of replicas with two transports, all active at once."""
    pairs = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    groups = [group for ranks, group in pairs.items() if rank in ranks]
    tensor, gradients, parameters = (
        link(log, batched, group) for group in (groups[0], groups[1], groups[1])
    )
    options = LinearOptions(Schedule(lanes=1))
    out, back = Buckets(gradients, options), Buckets(parameters, options)
    for _ in range(3):
        first = out.reduce_scatter(torch.ones(8))
        layer(tensor)
        second = back.all_gather(torch.ones(8))
        if rank < 2:
            first.wait()
        layer(tensor)
        first.wait()
        tensor.confirm("the step")
        second.wait()
    return [tensor, gradients, parameters]


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_recorded_runs_are_proved(ranks, tmp_path, size: int, batched: bool) -> None:
    ranks(size).run(record, str(tmp_path), of_cases, batched, drawn(size, 40))
    result = verify_logs([tmp_path])
    assert (result.faults, result.notes) == ([], [])
    assert result.operations >= 40 * size
    assert result.messages > 0


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_groups_under_way_at_once_are_proved(ranks, tmp_path, batched: bool) -> None:
    ranks(4).run(record, str(tmp_path), several_groups, batched)
    result = verify_logs([tmp_path])
    # Three times two layers, forward and backward, and two buckets.
    assert (result.faults, result.notes, result.operations) == ([], [], 4 * 3 * (2 * 2 + 2))


def gather(made: Transport) -> torch.Tensor:
    shard, options = torch.full((1, 2), float(made.rank)), LinearOptions(Schedule(lanes=2))
    return all_gather_linear(shard, torch.eye(2), transport=made, options=options)


def hangs(rank: int, log: OrderLog, batched: bool) -> list[Transport]:
    """Rank 1 skips an operation, and rank 0 times out in its wait."""
    transport = link(log, batched)
    gather(transport)
    if rank == 1:
        transport.order_log = None
        return [transport]
    transport.timeout = BRIEF
    with pytest.raises(TransportError):
        gather(transport)
    return [transport]


def test_a_run_that_failed_says_who_waits_for_whom(ranks, tmp_path) -> None:
    ranks(2).run(record, str(tmp_path), hangs, False)
    result = verify_logs([tmp_path])
    assert any("a transport of rank 0 broke" in note for note in result.notes)
    assert re.search("deadlock .*rank 0 waits .*rank 1 has nothing more to do", result.faults[0])
    assert "rank 1 lacks operation 1 (all_gather_linear)" in "".join(result.faults)


# ---------------------------------------------------------------------- the recorder


def unwritable_later(rank: int, folder: str) -> list[list[float]]:
    """The log file is a link to /dev/full: writes to it fail."""
    path = Path(folder) / f"rank_{rank:05d}.jsonl"
    path.symlink_to("/dev/full")
    log = OrderLog(Path(folder), rank, dist.get_world_size())
    transport = link(log, False)
    gathered = gather(transport)
    transport.close()
    log.close()
    return gathered.tolist()


def test_a_full_disk_ends_the_recording_and_not_the_job(ranks, tmp_path) -> None:
    assert ranks(2).run(unwritable_later, str(tmp_path)) == [[[0.0, 0.0], [1.0, 1.0]]] * 2
