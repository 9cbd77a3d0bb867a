"""What a rank computes alone is what it computed with the others, and in the plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.ops import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.one_device.backend import register
from tests.one_device.layers import layers
from tests.one_device.recording import ReplayError

SCHEDULES = [Schedule(), Schedule(lanes=1, chunks=3), Schedule(chunks=4)]


def alone(rank: int, schedule: Schedule, batched: bool) -> None:
    device = register()
    link = Transport.create(lanes=3, timeout=PATIENT, batched=batched, check="always")
    options = LinearOptions(schedule)
    plain = layers(link, options, fused=False)
    with device.recording() as recording:
        together = layers(link, options, fused=True)
    assert all(map(torch.equal, together, plain)), "not the plain form"
    for checked in (False, True):
        with device.replaying(recording, checked=checked):
            found = layers(link, options, fused=True)
        assert all(map(torch.equal, found, together)), "not what it was together"
    assert not link.scratch.lent


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3])
def test_it_has_the_bits_of_all_ranks(
    ranks: Any, size: int, schedule: Schedule, batched: bool
) -> None:
    ranks(size).run(alone, schedule, batched)


def what_is_refused(rank: int) -> list[str]:
    device, link = register(), Transport.create(timeout=PATIENT)
    with device.recording() as recording:
        layers(link, LinearOptions(), fused=True)
    said = []
    for chunks, fused in ((2, True), (1, False)):
        with pytest.raises((ReplayError, RuntimeError)) as error, device.replaying(recording):
            layers(link, LinearOptions(Schedule(chunks=chunks)), fused=fused)
        said.append(str(error.value))
        link = Transport.create(timeout=PATIENT)
    with pytest.raises(ReplayError) as error, device.replaying(recording):
        pass
    return [*said, str(error.value)]


def test_only_what_was_recorded_is_run_alone(ranks: Any) -> None:
    for shorter, plain, nothing in ranks(2).run(what_is_refused):
        assert "Run alone what was run together" in shorter
        assert "Run alone what was run together" in plain
        assert nothing.startswith("recorded and not run again: send to")


def two_groups_in_a_batch(rank: int) -> None:
    register()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    batch = [dist.P2POp(dist.isend, torch.ones(1), 1 - rank, group) for group in groups]
    with pytest.raises(ValueError, match="same group"):
        dist.batch_isend_irecv(batch)


def test_a_batch_is_of_one_group(ranks: Any) -> None:
    ranks(2).run(two_groups_in_a_batch)
