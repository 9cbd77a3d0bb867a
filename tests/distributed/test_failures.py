"""What goes wrong is said, in time: no hang, no abort of the process, no wrong number."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import MismatchError, Schedule, Transport, TransportError
from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    clip_gradient_norm,
    linear_reduce_scatter,
)
from commfuse_npu.ops.linear import linear_all_reduce
from commfuse_npu.plan.rules import gather_use
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime import agreement
from tests.distributed.programs import gather_and_use
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


def link(**options: Any) -> Transport:
    return Transport.create(lanes=2, timeout=PATIENT, **options)


def layer(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 4, dtype=dtype), torch.ones(3, 4, dtype=dtype)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rows", ". here, . there"),
        ("dtype", "torch.[a-z0-9]+ here, torch.[a-z0-9]+ there"),
        ("operation", ".*linear.* here, .*linear.* there"),
        ("schedule", ".* chunks here, .* chunks there"),
        ("options", ".*(whole|blocks).* here, .*(whole|blocks).* there"),
        ("wgrad", ".* here, .* there"),
        ("path", ".* here, .* there"),
    ],
)
@on_ranks(2)
def test_ranks_that_disagree_are_told_what_about(rank: int, what: str, words: str) -> None:
    """Rank 1 does something else."""
    other = what if rank else ""
    x, weight = layer(
        {"rows": 5, "path": 0}.get(other, 4), torch.bfloat16 if other == "dtype" else torch.float32
    )
    # "blocks" changes when transfers are posted, and on HCCL messages match by order.
    wgrad: Any = "blocks" if other == "options" else "whole"
    options = LinearOptions(Schedule(chunks=2 if other == "schedule" else 1), wgrad=wgrad)
    scatters = what == "options" or other == "operation"
    op = linear_reduce_scatter if scatters else all_gather_linear
    if what == "wgrad":
        x, weight = x.requires_grad_(), weight.requires_grad_(rank == 0)
    transport = link()

    def call() -> None:
        y = op(x, weight, transport=transport, options=options)
        if what == "wgrad":
            y.sum().backward()

    with pytest.raises(MismatchError, match=f"{what}: {words}") as caught:
        call()
    named = r"linear\S*( \S+)?: rank (.) and peer (?!\2). of the group do not call the same"
    assert re.search(named, str(caught.value))
    assert "Nothing was sent; call it alike on all ranks" in str(caught.value)


def shapes_known_to_both_but_mixed_up(rank: int) -> None:
    transport = link()
    for rows in (4, 8):
        all_gather_linear(*layer(rows), transport=transport)
    transport.timeout = BRIEF
    with pytest.MonkeyPatch.context() as patch:
        # However much later the other one gives up, they meet.
        patch.setattr(agreement, "_EXPLAINING", PATIENT)
        all_gather_linear(*layer(8 if rank else 4), transport=transport)


def test_mixed_up_shapes_time_out_instead_of_aborting(ranks) -> None:
    """A receive that is too short aborts the process on gloo; tags keep the two apart."""
    for outcome in ranks(2).outcomes(shapes_known_to_both_but_mixed_up):
        assert isinstance(outcome.error, MismatchError)
        message = str(outcome.error)
        assert "all_gather_linear: receiving block" in message
        assert re.search(r"rank (.) and peer (?!\1). of the group do not .* rows: . here", message)


def dies_before_a_backward_by_collectives(rank: int) -> str:
    transport = link()
    x, weight = layer(4)
    weight.requires_grad_()
    options = LinearOptions(collectives_from=1)
    y = all_gather_linear(x, weight, transport=transport, options=options)
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
    assert "all_gather_linear backward: not every rank came here" in alive.value


def raises_between(rank: int) -> None:
    transport = link()

    def use(piece: torch.Tensor, rows: slice) -> None:
        raise KeyError("in the callback")

    try:
        gather_and_use(transport, torch.ones(2, 2), use)
    except KeyError:
        all_gather_linear(*layer(4), transport=transport)


def test_an_exception_in_a_callback_breaks_the_transport(ranks) -> None:
    for outcome in ranks(2).outcomes(raises_between):
        assert "gather_and_use was interrupted by KeyError('in the callback')" in str(outcome.error)
        assert "This transport cannot be used any more" in str(outcome.error)


@on_ranks(2)
def test_inputs_that_cannot_work_are_refused(rank: int) -> None:
    """Refused on every rank before anything is posted: the transport goes on working."""
    transport = link()
    x, weight = layer(4)
    sink = lambda piece, rows: None  # noqa: E731
    fused = partial(all_gather_linear, transport=transport)
    other_group, other_way = (
        gather_use(Place(Schedule(), *place), 2, 2, False)
        for place in ((0, 3, False), (rank, 2, True))
    )
    types: list[tuple[str, Callable[[], object]]] = [
        ("x is torch.int64; choose one of float32, bf", lambda: fused(x.long(), weight.long())),
        ("x is torch.float32, the weight torch.bfloat16; ", lambda: fused(x, weight.bfloat16())),
    ]
    values: list[tuple[str, Callable[[], object]]] = [
        ("x has 4 features, the weight takes 5", lambda: fused(x, torch.ones(3, 5))),
        (r"bias has shape \(4,\); it has to be \(3,\)", lambda: fused(x, weight, torch.ones(4))),
        (r"they have to be \[S, ..., I\] and \[O, I\]", lambda: fused(x[0], weight)),
        (
            "sequence length 5 is not divisible by the group size 2; pad it to 6, or use "
            "linear_all_reduce",
            lambda: linear_reduce_scatter(torch.ones(5, 4), weight, transport=transport),
        ),
        ("x is on cpu, the weight on meta; move one of", lambda: fused(x, weight.to("meta"))),
        (
            "x is on meta, the group transfers cpu tensors; move it there",
            lambda: fused(x.to("meta"), weight.to("meta")),
        ),
        (
            r"shard of shape \(3, 2\) is not contiguous",
            lambda: gather_and_use(link(), torch.ones(2, 3).t(), sink),
        ),
        (
            r"shard has shape \(2,\); it has to be a matrix",
            lambda: gather_and_use(link(), torch.ones(2), sink, shape=(2, 1)),
        ),
        (
            "the program is for rank 0 of 3, the transport is rank . of 2",
            lambda: transport.begin(other_group, "other", x),
        ),
        (
            "the program is made for batches, the transport posts the other way",
            lambda: transport.begin(other_way, "other", x),
        ),
        ("'half' is unknown; choose whole or blocks", lambda: LinearOptions(wgrad="half")),
        (
            "reduce_dtype is torch.int32; partial sums need a floating-point dtype",
            lambda: LinearOptions(reduce_dtype=torch.int32),
        ),
        ("check 'nver' is unknown; choose first or always", lambda: link(check="nver")),
    ]
    for kind, cases in ((TypeError, types), (ValueError, values)):
        for words, call in cases:
            with pytest.raises(kind, match=words):
                call()
    y = all_gather_linear(x, weight, transport=transport)
    assert torch.equal(y, torch.full((8, 3), 4.0))


@on_ranks(2)
def test_main_grad_that_cannot_be_added_to_is_refused(rank: int) -> None:
    x, weight = layer(4)
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.int32)
    y = all_gather_linear(x, weight, transport=link(), options=LinearOptions(main_grad=True))
    with pytest.raises(RuntimeError, match=r"main_grad is torch\.int"):
        y.sum().backward()


@on_ranks(2)
def test_a_second_thread_is_refused(rank: int) -> None:
    transport = link()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            all_gather_linear(*layer(4), transport=transport)
        except TransportError as error:
            errors.append(error)

    def use(piece: torch.Tensor, rows: slice) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    gather_and_use(transport, torch.ones(2, 2), use)
    assert len(errors) == 2
    assert "called from a second thread while gather_and_use is under way" in str(errors[0])


@on_ranks(2)
def test_zero_rows_take_the_plain_path(rank: int) -> None:
    transport = link()
    weight = torch.ones(3, 4, requires_grad=True)
    for op, rows in ((all_gather_linear, 0), (linear_reduce_scatter, 0), (linear_all_reduce, 0)):
        x = torch.ones(rows, 2, 4, requires_grad=True)
        y = op(x, weight, transport=transport)
        assert y.shape == (0, 2, 3)
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert not weight.grad.any()
    assert transport.operations == 0


@on_ranks(3)
def test_lanes_that_do_not_exist_are_refused(rank: int) -> None:
    x, weight = layer(4)
    transport = Transport.create(lanes=1, timeout=PATIENT)
    with pytest.raises(
        ValueError, match="the program uses 2 lanes, the transport has 1; create it"
    ):
        all_gather_linear(x, weight, transport=transport, options=LinearOptions(Schedule(lanes=2)))
    # A schedule that leaves lanes open takes those that there are.
    assert all_gather_linear(x, weight, transport=transport).shape == (12, 3)


@on_ranks(2)
def test_lanes_are_checked(rank: int) -> None:
    for lanes in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="it must be a whole number from 1"):
            Transport.create(lanes=lanes)
    with pytest.raises(MismatchError, match=r"different numbers of lanes \(rank 0: 1, rank 1: 2\)"):
        Transport.create(lanes=1 + rank)


def absent_from_the_start(rank: int) -> None:
    transport = link()
    transport.timeout = 3 * BRIEF
    dist.barrier()
    if rank != 1:
        all_gather_linear(*layer(4), transport=transport)


def test_a_rank_that_does_not_come_to_the_first_call_is_named(ranks) -> None:
    outcomes = ranks(3).outcomes(absent_from_the_start)
    assert outcomes[1].error is None
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, TransportError), outcomes[rank]
        for part in ("all_gather_linear", "before step 0", "no answer from peer 1"):
            assert part in str(outcomes[rank].error)


@on_ranks(3)
def test_what_fewest_ranks_met_comes_first(rank: int) -> None:
    words = r"\(peer 2: lane 0 of 2: not on 1; peer 0, 1: lane 0 of 2: not on 0\)"
    nowhere = RuntimeError(f"not on {rank // 2}")
    with (
        mock.patch.object(dist, "new_group", side_effect=nowhere),
        pytest.raises(TransportError, match=words),
    ):
        link()


def absent_from_the_rest(rank: int) -> None:
    """Five rows for two ranks: the last one is summed by the collective."""
    transport = link()
    if rank == 1:
        transport.all_reduce = lambda name, tensor: None  # type: ignore[method-assign]
    else:
        transport.timeout = BRIEF
    x, weight = layer(5)
    linear_all_reduce(x, weight, transport=transport)


def absent_from_the_norm(rank: int) -> None:
    transport = link()
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    transport.agree("clip_gradient_norm", max_norm=1.0)
    transport.timeout = BRIEF
    if rank == 0:
        clip_gradient_norm(model, 1.0, transport)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (absent_from_the_rest, "linear_all_reduce rest"),
        (absent_from_the_norm, "clip_gradient_norm"),
    ],
)
def test_the_groups_own_collectives_have_the_transports_limit(ranks, function, name: str) -> None:
    """That of the group is longer than the test may take."""
    waiting, left = ranks(2).outcomes(function)
    assert left.error is None, left.trace
    assert isinstance(waiting.error, TransportError), waiting
    assert f"{name}: not every rank came here: " in str(waiting.error)


@on_ranks(2)
def test_a_closed_transport_says_so(rank: int) -> None:
    transport = link()
    transport.close()
    with pytest.raises(TransportError, match="it was closed"):
        all_gather_linear(*layer(4), transport=transport)


@on_ranks(4)
def test_every_group_of_a_job_gets_lanes(rank: int) -> None:
    """Two groups of two ranks: every process makes the lanes of both, and uses its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    transport = Transport.create(groups[rank // 2], lanes=2, timeout=PATIENT)
    assert transport.ranks == ((0, 1) if rank < 2 else (2, 3))
    x = torch.full((2, 4), float(rank))
    y = all_gather_linear(x, torch.eye(4), transport=transport)
    first = float(rank // 2 * 2)
    assert torch.equal(y[:, 0], torch.tensor([first, first, first + 1, first + 1]))


def confirms(rank: int, case: str) -> int:
    transport = link()
    if case == "somewhere else" and rank == 1:
        all_gather_linear(*layer(4), transport=transport)
    if case == "broken":
        transport.fail("planted")
    transport.confirm("the end")
    if case == "not there":
        if rank == 1:
            return -1
        transport.timeout = BRIEF
    transport.confirm("the end")
    all_gather_linear(*layer(4), transport=transport)
    transport.confirm("the end")
    return transport.operations


def test_ranks_that_meet_go_on(ranks) -> None:
    assert ranks(2).run(confirms, "all there") == [1, 1]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        # Every time, unlike a comparison, which the ranks make once.
        ("not there", TransportError, "comparing the end with the other ranks"),
        ("somewhere else", MismatchError, "operation: "),
        ("broken", TransportError, "planted"),
    ],
)
def test_a_rank_that_does_not_meet_the_others_is_named(ranks, case: str, kind, words: str) -> None:
    for outcome in ranks(2).outcomes(confirms, case):
        if outcome.value != -1:
            assert isinstance(outcome.error, kind), outcome
            assert words in str(outcome.error)
