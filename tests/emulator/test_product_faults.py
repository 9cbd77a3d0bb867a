"""Faults planted in the product, which gloo would not show or would show by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import gather_and_use
from tests.emulator.link import Link
from tests.limits import PATIENT

Fault = Callable[[int, Transport, pytest.MonkeyPatch], None]


def none(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    """The product as it is."""


def single_operations(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    """As on gloo: each transfer for itself, receives first."""
    link.batched = False


def lanes_swapped_on_one_rank(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    if rank == 1:
        link._lanes = link._lanes[::-1]


def collective_on_a_lane(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    """Somebody else's all-reduce, before the batches on one rank and between them on others."""
    post = dist.batch_isend_irecv

    def first_or_later(operations: Any) -> Any:
        token = torch.ones(1)
        if rank == 0:
            dist.all_reduce(token, group=link._lanes[0], async_op=True)
        works = post(operations)
        if rank != 0:
            dist.all_reduce(token, group=link._lanes[0], async_op=True)
        return works

    patch.setattr(dist, "batch_isend_irecv", first_or_later)


def one_step_skipped(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    """Rank 1 keeps the data of its last step to itself."""
    post = dist.batch_isend_irecv
    steps = iter(range(2))

    def all_but_the_last(operations: Any) -> Any:
        return [] if rank == 1 and next(steps) == 1 else post(operations)

    patch.setattr(dist, "batch_isend_irecv", all_but_the_last)


def arrivals_not_waited_for(rank: int, link: Transport, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Running, "_wait", lambda self, steps, posted, way: None)


def gathered(rank: int, fault: Fault) -> tuple[str, torch.Tensor]:
    """The error of a gather with a fault in it, and what was consumed."""
    link = Transport.create(lanes=2, timeout=PATIENT, batched=True)
    got = torch.zeros(2 * link.size, 1)
    with pytest.MonkeyPatch.context() as patch:
        fault(rank, link, patch)
        try:
            gather_and_use(
                link,
                torch.full((2, 1), float(rank)),
                lambda piece, rows: got[rows].copy_(piece),
                Schedule(lanes=2),
            )
        except RuntimeError as error:
            return str(error), got[:, 0]
    return "", got[:, 0]


WHOLE = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_without_a_fault(emulated: Any) -> None:
    for error, got in emulated(3).run(gathered, none):
        assert error == ""
        assert got.tolist() == WHOLE


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (single_operations, ["deadlock: a cycle of ranks 0 -> 2 -> 1 -> 0", "pair communicator"]),
        (lanes_swapped_on_one_rank, ["deadlock: ", "has not posted"]),
        (collective_on_a_lane, ["deadlock: a cycle of ranks", "queued behind its batch"]),
        (one_step_skipped, ["deadlock: ranks 0 -> 1", "rank 1 has not posted the send"]),
    ],
)
def test_wrong_orders_are_reported(emulated: Any, fault: Fault, words: list[str]) -> None:
    outcomes = emulated(3).outcomes(gathered, fault)
    errors = [outcome.value[0] for outcome in outcomes]
    for word in words:
        assert any(word in error for error in errors), errors
    assert errors[0] != ""


def test_data_used_before_their_arrival_are_wrong(emulated: Any) -> None:
    for outcome in emulated(3).outcomes(gathered, arrivals_not_waited_for):
        _, got = outcome.value
        assert got.isnan().sum() == 4, "the blocks of the others are not there yet"


# ---------------------------------------------------------------------- links


def warmed_by_a_collective(link: Transport) -> None:
    """What looks like warming up, and opens no link of a batch."""
    for lane in link._lanes:
        dist.all_reduce(torch.ones(1), group=lane)


def opened_in_use(rank: int, by_collective: bool) -> list[str]:
    """What the first operation of a new transport opens."""
    found: list[str] = []
    real = Link.open

    def noted(self: Link, communicators: Any, seconds: float) -> None:
        found.extend(map(str, communicators))
        real(self, communicators, seconds)

    with pytest.MonkeyPatch.context() as patch:
        if by_collective:
            patch.setattr(Transport, "_warm_up", warmed_by_a_collective)
        link = Transport.create(lanes=2, timeout=PATIENT, batched=True)
        patch.setattr(Link, "open", noted)
        gather_and_use(link, torch.zeros(2, 1), lambda piece, rows: None, Schedule(lanes=2))
    return found


def test_a_new_transport_has_all_its_links_open(emulated: Any) -> None:
    assert emulated(3).run(opened_in_use, False) == [[], [], []]


def test_a_collective_opens_no_links(emulated: Any) -> None:
    for rank, found in enumerate(emulated(3).run(opened_in_use, True)):
        # Each lane carries one distance, over which a rank has a link to either side.
        assert len(found) == 4, found
        assert all(f"{rank}" in one and "link of ranks" in one for one in found)
