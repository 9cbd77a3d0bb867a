"""Every rank hears every other, or learns which one is missing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.runtime.gather_objects import MissingRankError, gather_objects
from tests.limits import BRIEF, PATIENT


def said(rank: int) -> Any:
    return {"rank": rank, "text": "x" * 1000 * rank}


def heard(rank: int) -> list[list[Any]]:
    group = dist.new_group()
    # Without numpy, which torch does not require.
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("no numpy")):
        return [gather_objects(value, group, PATIENT) for value in (said(rank), None)]


def test_everyone_hears_everyone(ranks) -> None:
    for answers in ranks(3).run(heard):
        assert answers == [[said(0), said(1), said(2)], [None] * 3]


def heard_in_a_part(rank: int) -> list[Any]:
    group = dist.new_group([2, 0])
    return gather_objects(rank, group, PATIENT) if rank != 1 else []


def test_answers_are_in_the_order_of_the_group(ranks) -> None:
    members = ranks(3).run(heard_in_a_part)
    assert members == [[0, 2], [], [0, 2]]


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
