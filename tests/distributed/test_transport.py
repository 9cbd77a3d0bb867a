"""What a transport does before the first operation, what it keeps, and how its ranks compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Transport
from commfuse_npu.ops import Buckets, all_gather_linear
from commfuse_npu.runtime import agreement, post_time
from commfuse_npu.runtime.gather_objects import MissingRankError, gather_objects
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


@pytest.mark.parametrize("batched", [False, True], ids=["eager", "batched"])
@on_ranks(3)
def test_every_lane_is_warmed_over_every_distance_in_one_order(rank: int, batched: bool) -> None:
    """A collective would not open the links that batches use."""
    sent: list[tuple[Any, int]] = []
    p2p, isend = dist.P2POp, dist.isend

    def send(tensor: torch.Tensor, to: int, group: Any = None, tag: int = 0) -> Any:
        # The group for comparisons sends too; only the lanes send the number of a rank.
        if tensor.numel() == 1 and tensor.item() == rank:
            sent.append((group, to))
        return isend(tensor, to, group, tag)

    def operation(op: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        if op is dist.isend:
            sent.append((group, peer))
        return p2p(isend if op is send else op, tensor, peer, group)

    with mock.patch.object(dist, "P2POp", operation), mock.patch.object(dist, "isend", send):
        if batched:
            with mock.patch.object(dist, "isend", isend):
                link = Transport.create(lanes=2, timeout=PATIENT, batched=True)
        else:
            link = Transport.create(lanes=2, timeout=PATIENT, batched=False)
    lanes = list(link.lane_groups)
    order = [(lanes.index(group), (to - rank) % 3) for group, to in sent if group in lanes]
    assert order == [(0, 1), (0, 2), (1, 1), (1, 2)]  # lane and distance


def remembers(rank: int) -> int:
    link = Transport.create(lanes=2, timeout=PATIENT)
    with mock.patch.multiple(agreement, _MOST_AGREED=3, _MOST_BEGUN=3):
        for rows in (1, 2, 3, 4, 5, 1, 2):
            y = all_gather_linear(torch.ones(rows, 4), torch.ones(3, 4), transport=link)
            assert torch.equal(y, torch.full((2 * rows, 3), 4.0))
            link.agree("another", limit=float(rows))
            assert max(len(link._agreed), len(link._begun)) <= 3
    return len(link._agreed)


def test_what_was_agreed_on_is_forgotten_alike(ranks) -> None:
    one, other = ranks(2).run(remembers)
    assert one == other


class _Erased:
    """Stands in for the streams of HCCL's lanes: whose memory was erased, and from how many."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def erase(self, tensors: Iterable[torch.Tensor], lanes: int) -> None:
        self.found += [(tensor.untyped_storage().data_ptr(), lanes) for tensor in tensors]


@on_ranks(3)
def test_what_was_transferred_is_erased_from_the_lanes_once_it_is_waited_for(rank: int) -> None:
    link, erased = Transport.create(lanes=2, timeout=PATIENT), _Erased()
    assert link.lane_streams is None, "gloo has none"
    link.lane_streams = erased  # type: ignore[assignment]
    x = torch.ones(4, 3)
    all_gather_linear(x, torch.ones(2, 3), transport=link)
    assert (x.untyped_storage().data_ptr(), 2) in erased.found
    # Buckets of one buffer: the last that is done erases it.
    buckets, buffer = Buckets(link), torch.ones(12)
    handles = [buckets.all_gather(bucket) for bucket in buffer.split(6)]
    erased.found.clear()
    handles[0].wait()
    assert erased.found == []
    handles[1].wait()
    assert erased.found == [(buffer.untyped_storage().data_ptr(), 2)]


# ------------------------------------------------------------------- what ranks compare with


def said(rank: int) -> Any:
    return {"rank": rank, "text": "x" * 1000 * rank}


@on_ranks(3)
def test_everyone_hears_everyone(rank: int) -> None:
    group = dist.new_group()
    # Without numpy, which torch does not require.
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("no numpy")):
        answers = [gather_objects(value, group, PATIENT) for value in (said(rank), None)]
    assert answers == [[said(0), said(1), said(2)], [None] * 3]


@on_ranks(3)
def test_answers_are_in_the_order_of_the_group(rank: int) -> None:
    group = dist.new_group([2, 0])
    if rank != 1:
        assert gather_objects(rank, group, PATIENT) == [0, 2]


def missed(rank: int) -> tuple[int, str] | None:
    group = dist.new_group()
    if rank == 1:
        return None
    with pytest.raises(MissingRankError) as caught:
        gather_objects(said(rank), group, BRIEF)
    return caught.value.peer, str(caught.value)


def test_a_rank_that_does_not_come_is_named(ranks) -> None:
    group = ranks(4)
    found = group.run(missed)
    group.kill()  # messages are left over
    for rank in (0, 2, 3):
        assert found[rank][0] == 1
        assert found[rank][1].startswith("no answer from peer 1: ")


@on_ranks(3)
def test_what_a_post_costs_is_the_same_on_all_ranks(rank: int) -> None:
    """The slowest rank's, as measured."""
    link = Transport.create(lanes=1, timeout=PATIENT)
    with mock.patch.object(post_time, "median", lambda found: len(found) + rank):
        assert post_time.post_seconds(link) == 18
    assert post_time.post_seconds(link) > 0
