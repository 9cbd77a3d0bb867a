"""Failures are reported within the time limit: no hang, no process abort, no wrong result."""

from __future__ import annotations

import os
import re
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from commfuse_npu import MismatchError, Transport, TransportError
from commfuse_npu.ops import LinearOptions, all_gather_linear
from commfuse_npu.ops.linear import linear_all_reduce
from commfuse_npu.runtime import agreement
from tests.distributed.programs import gather_and_use
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


def link() -> Transport:
    return Transport.create(lanes=2, timeout=PATIENT)


def layer(rows: int, made: Transport, options: LinearOptions | None = None) -> torch.Tensor:
    x, weight = torch.ones(rows, 4), torch.ones(3, 4, requires_grad=True)
    return all_gather_linear(x, weight, transport=made, options=options or LinearOptions())


def shapes_known_to_both_but_mixed_up(rank: int) -> None:
    transport = link()
    for rows in (4, 8):
        layer(rows, transport)
    transport.timeout = BRIEF
    # The ranks meet for the diagnosis however much later the other one gives up.
    with mock.patch.object(agreement, "_DIAGNOSIS_TIMEOUT", PATIENT):
        layer(8 if rank else 4, transport)


def test_mixed_up_shapes_time_out_instead_of_aborting(ranks) -> None:
    """On gloo a receive that is too short aborts the process; tags separate the two shapes."""
    for outcome in ranks(2).outcomes(shapes_known_to_both_but_mixed_up):
        assert isinstance(outcome.error, MismatchError)
        message = str(outcome.error)
        assert "all_gather_linear: receiving block" in message
        assert re.search(r"rank (.) and peer (?!\1). of the group call .* rows: . here", message)


def dies_before_a_backward_by_collectives(rank: int) -> str:
    transport = link()
    y = layer(4, transport, LinearOptions(collectives_from=1))
    if rank == 1:
        os._exit(0)
    with pytest.raises(TransportError) as caught:
        y.sum().backward()
    assert transport.broken
    return str(caught.value)


def test_a_rank_that_dies_before_a_backward_by_collectives_becomes_an_error(ranks) -> None:
    group = ranks(2)
    alive, _ = group.outcomes(dies_before_a_backward_by_collectives, may_die=True)
    group.kill()
    assert alive.error is None, alive.trace
    assert "all_gather_linear backward: not every rank called it" in alive.value


@on_ranks(2)
def test_a_second_thread_is_refused(rank: int) -> None:
    transport = link()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            layer(4, transport)
        except TransportError as error:
            errors.append(error)

    def use(piece: torch.Tensor, rows: slice) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    gather_and_use(transport, torch.ones(2, 2), use)
    assert len(errors) == 2
    assert "called from a second thread while gather_and_use is under way" in str(errors[0])


def absent_from_the_rest(rank: int) -> None:
    """Five rows for two ranks: the fifth row is summed by the collective, which rank 1 skips."""
    transport = link()
    if rank == 1:
        transport.all_reduce = lambda name, tensor: None
    else:
        transport.timeout = BRIEF
    linear_all_reduce(torch.ones(5, 4), torch.ones(3, 4), transport=transport)


def test_the_groups_own_collectives_have_the_transports_limit(ranks) -> None:
    """The group's own timeout is longer than the limit of the test."""
    waiting, absent = ranks(2).outcomes(absent_from_the_rest)
    assert absent.error is None, absent.trace
    assert isinstance(waiting.error, TransportError), waiting
    assert "linear_all_reduce rest: not every rank called it: " in str(waiting.error)


def confirms(rank: int, case: str) -> Any:
    transport = link()
    if case == "somewhere else" and rank == 1:
        layer(4, transport)
    if case == "broken":
        transport.fail("planted")
    transport.confirm("the end")
    if case == "not there":
        if rank == 1:
            return "not there"
        transport.timeout = BRIEF
    transport.confirm("the end")
    layer(4, transport)
    transport.confirm("the end")
    return transport.operations


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("all there", None, "1"),
        # confirm() compares every time, while operations are compared once.
        ("not there", TransportError, "comparing the end with the other ranks"),
        ("somewhere else", MismatchError, "operation: "),
        ("broken", TransportError, "planted"),
    ],
)
def test_a_rank_that_does_not_meet_the_others_is_named(ranks, case: str, kind, words: str) -> None:
    for outcome in ranks(2).outcomes(confirms, case):
        if outcome.value != "not there":
            assert kind is None or isinstance(outcome.error, kind), outcome
            assert words in str(outcome.error or outcome.value)
