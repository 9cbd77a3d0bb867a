"""A new transport opens its links before the first program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import gather_and_use
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT


@on_ranks(3)
def test_a_new_transport_has_all_its_links_open(rank: int) -> None:
    """HCCL opens a link at its first batch and blocks both hosts, so not within a program.

    A collective would not open the links (group, peer) that batches use.
    """
    opened: set[tuple[int, int]] = set()
    post = dist.batch_isend_irecv

    def noted(operations: list[dist.P2POp]) -> Any:
        opened.update((id(p2p.group), p2p.peer) for p2p in operations)
        return post(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted)
        link = Transport.create(lanes=2, timeout=PATIENT)
        before = len(opened)
        gather_and_use(link, torch.zeros(2, 1), lambda piece, rows: None, Schedule(lanes=2))
    # Two lanes with two peers each.
    assert len(opened) == before == 4
