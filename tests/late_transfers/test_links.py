"""What HCCL does not take, and links that are open before the first program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import gather_and_use
from tests.late_transfers.late import LateTransferError
from tests.limits import PATIENT


def refused(rank: int) -> list[str]:
    peer, other = 1 - rank, torch.zeros(3, 4)
    said = []
    for operations in (
        [dist.P2POp(dist.isend, other.t(), peer)],
        [dist.P2POp(dist.irecv, one, peer) for one in (other[0], other[1])],
    ):
        with pytest.raises(LateTransferError) as error:
            dist.batch_isend_irecv(operations)
        said.append(str(error.value))
    return said


def test_what_hccl_does_not_take(ranks: Any) -> None:
    for strided, twice in ranks(2).run(refused):
        assert "strides (1, 4) is not contiguous" in strided
        assert twice.startswith("a batch with two irecv of one rank")


def warmed_by_a_collective(link: Transport) -> None:
    """What looks like warming up, and opens no link of a batch."""
    for lane in link.lane_groups:
        dist.all_reduce(torch.ones(1), group=lane)


def opened_in_use(rank: int, by_collective: bool) -> int:
    """How many links the first operation of a new transport opens: (group, peer) of a batch."""
    opened: set[tuple[int, int]] = set()
    post = dist.batch_isend_irecv

    def noted(operations: list[dist.P2POp]) -> Any:
        opened.update((id(one.group), one.peer) for one in operations)
        return post(operations)

    with pytest.MonkeyPatch.context() as patch:
        if by_collective:
            patch.setattr(Transport, "_warm_up", warmed_by_a_collective)
        patch.setattr(dist, "batch_isend_irecv", noted)
        link = Transport.create(lanes=2, timeout=PATIENT)
        before = len(opened)
        gather_and_use(link, torch.zeros(2, 1), lambda piece, rows: None, Schedule(lanes=2))
    return len(opened) - before


def test_a_new_transport_has_all_its_links_open(ranks: Any) -> None:
    """HCCL opens a link at its first batch, both hosts standing still: not in mid-program."""
    assert ranks(3).run(opened_in_use, False) == [0, 0, 0]
    # Each lane carries one distance, over which a rank has a link to either side.
    assert ranks(3).run(opened_in_use, True) == [4, 4, 4]
