"""Ranks that fail or call different operations get an error within the time limit: no hang, no
process abort, no wrong result."""

import os
import re
import signal
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import MismatchError, Transport, TransportError
from commfuse_npu.ops import LinearOptions, all_gather_linear, linear, linear_all_reduce
from commfuse_npu.ops.call import WeightGradient
from commfuse_npu.runtime import agreement
from tests.distributed.programs import gather_and_use, match_by_order, new_link, watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


def layer(
    made: Transport, rows: int, inputs: int = 4, options: LinearOptions | None = None
) -> torch.Tensor:
    x = torch.ones(rows, inputs, requires_grad=True)
    weight = torch.ones(3, inputs, requires_grad=True)
    return all_gather_linear(x, weight, group=made, options=options or LinearOptions())


def shapes_known_to_both_but_mixed_up(rank: int) -> None:
    transport = new_link()
    for rows in (4, 8):
        layer(transport, rows)
    transport.timeout = BRIEF
    # The ranks meet for the diagnosis however much later the other one gives up.
    with mock.patch.object(agreement, "_DIAGNOSIS_TIMEOUT", PATIENT):
        layer(transport, 8 if rank else 4)


def test_mixed_up_shapes_time_out_instead_of_aborting(ranks) -> None:
    """On gloo a receive that is too short aborts the process; tags separate the two shapes."""
    for outcome in ranks(2).outcomes(shapes_known_to_both_but_mixed_up):
        assert isinstance(outcome, MismatchError)
        message = str(outcome)
        what = r"all_gather_linear: receiving block . \(.*\), peer ., step 0 of 0, lane 0"
        assert re.search(what, message)
        assert re.search(r"rank (.) and peer (?!\1). of the group call .* rows: . here", message)


def misses(rank: int, name: str) -> None:
    """Rank 1 dies before a backward by collectives, or skips the gather of sums."""
    transport = new_link()
    y = layer(transport, 4, options=LinearOptions(collectives_from=1))
    transport.confirm("the end")
    if name == "all_gather_linear backward":
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else y.sum().backward()
    if rank == 0:
        transport.timeout = BRIEF
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(linear, "begin_all_gather", lambda y, group: (y, mock.Mock()))
        linear_all_reduce(torch.ones(4, 4), torch.ones(3, 4), group=transport)


# The group's own timeout is longer than the limit of the test.
@pytest.mark.parametrize("name", ["all_gather_linear backward", "linear_all_reduce"])
def test_what_a_rank_did_not_come_to_is_named(ranks, name: str) -> None:
    waiting, _ = ranks(2).outcomes(misses, name)
    assert type(waiting) is TransportError, waiting
    assert f"{name}: not every rank called it" in str(waiting)


@on_ranks(2)
def test_a_second_thread_is_refused(rank: int) -> None:
    transport = new_link()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            layer(transport, 4)
        except TransportError as error:
            errors.append(error)

    def use(piece: torch.Tensor, rows: slice) -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    gather_and_use(transport, torch.ones(2, 2), use)
    assert len(errors) == 2
    assert "called from a second thread while gather_and_use is under way" in str(errors[0])


# ------------------------------------------------------------------ before an optimizer's step


class OwnStep(torch.optim.SGD):
    """A subclass that overrides ``step``, like the optimizers of Megatron and MindSpeed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def other_length(made: Transport, rank: int) -> None:
    """Another shape with as many elements, which HCCL delivers."""
    layer(made, *((4, 4), (8, 2))[rank % 2]).sum().backward()


def other_order(made: Transport, rank: int) -> None:
    for shape in ((8, 2), (4, 4))[:: (1, -1)[rank % 2]]:
        layer(made, *shape).sum().backward()


def one_more(made: Transport, rank: int) -> None:
    if rank == 0:
        made.agree("clip", {"rows": 3})


ROWS = r"all_gather_linear: .* rows: . here, . there; inputs: . here, . there"
NOTHING = r"clip: .* operation: (clip|None) here, (clip|None) there"


def stepped(rank: int, differs: Any) -> str:
    transport = new_link()
    weight = torch.nn.Parameter(torch.zeros(3))
    steps = OwnStep([weight], lr=1.0)
    weight.grad = torch.ones(3)
    for shape in ((4, 4), (2, 8), (4, 4)):
        layer(transport, *shape).sum().backward()
    transport.agree("clip", {"rows": 2})
    steps.step()
    assert torch.equal(weight, -torch.ones(3))
    layer(transport, 4).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        match_by_order(patch)
        differs(transport, rank)
    with pytest.raises(MismatchError) as caught:
        steps.step()
    assert torch.equal(weight, -torch.ones(3)), "weights were changed"
    assert transport.broken
    return str(caught.value)


@pytest.mark.parametrize(
    ("differs", "words"), [(other_length, ROWS), (other_order, ROWS), (one_more, NOTHING)]
)
def test_what_differs_is_found_before_weights_change(ranks, differs, words) -> None:
    for rank, message in enumerate(ranks(2).run(stepped, differs)):
        assert re.search(words, message)
        assert f"rank {rank} and peer {1 - rank} of the group call different operations" in message
        # Four layers of two operations each, and one clip come before it; counted from 0.
        assert "This was operation 9 of the transport" in message


@on_ranks(2)
def test_a_new_length_waits_for_nobody(rank: int) -> None:
    transport, compared = new_link(), list[object]()
    layer(transport, 1).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, agreement, "gather_objects", lambda value, *_: compared.append(value))
        for rows in range(2, 32):
            layer(transport, rows).sum().backward()
        assert compared == []
        for _ in range(2):
            transport.check_digests()
    # Once: nothing was begun between the two checks.
    ((operations, _),) = compared
    assert operations == 2 * 31


@on_ranks(2)
def test_a_size_of_zero_is_another_operation(rank: int) -> None:
    """A size of 0 skips part of the work, so the ranks compare it before anything is sent."""
    transport = new_link()
    transport.agree("op", {"rows": 4})
    with pytest.raises(MismatchError, match="Nothing was sent"):
        transport.agree("op" if rank else "another", {"rows": 0})


@on_ranks(4)
def test_several_transports_are_checked_together(rank: int) -> None:
    """Two kinds of pairs; the ranks disagree in one transport of the second kind."""
    pairs = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    groups = [group for ranks, group in pairs.items() if rank in ranks]
    tensor, replicas, closed = (new_link(group) for group in (groups[0], groups[1], groups[1]))
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    steps = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):
        # Independent groups, used in the opposite order on half of the ranks.
        for transport in (tensor, replicas)[:: 1 if rank < 2 else -1]:
            transport.agree("op", {"rows": rank % 2 if transport is replicas else 1})
        closed.agree("op", {"rows": 4})
        steps.step()
    closed.agree("op", {"rows": 4 + rank})
    closed.close()
    steps.step()
    tensor.agree("op", {"rows": 3})
    replicas.agree("op", {"rows": 5 + (rank == 3)})
    if rank % 2 == 0:
        steps.step()
        assert weight == -4
    else:
        with pytest.raises(MismatchError, match=r"op: rank . and peer . of the group"):
            steps.step()
        assert weight == -3
        assert replicas.broken
    assert not tensor.broken


NO_MEMORY = torch.OutOfMemoryError("no memory")


def fails_in_the_layer(made: Transport, rank: int) -> None:
    if rank == 1:
        with mock.patch.object(made.kernels, "gemm_into", side_effect=NO_MEMORY):
            layer(made, 4)


def fails_beside_collectives(made: Transport, rank: int) -> None:
    """In the weight gradient of a backward on torch's collectives."""
    y = layer(made, 4, options=LinearOptions(collectives_from=1))
    with mock.patch.object(WeightGradient, "add", side_effect=NO_MEMORY if rank == 1 else None):
        y.sum().backward()


@pytest.mark.parametrize("fails", [fails_in_the_layer, fails_beside_collectives])
@on_ranks(2)
def test_no_optimizer_steps_until_a_failed_transport_is_closed(rank: int, fails: Any) -> None:
    """Rank 1 skips the micro-batch that failed; another transport works on both ranks."""
    other, transport = new_link(), new_link()
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    steps = torch.optim.SGD([weight], lr=1.0)
    layer(transport, 4)
    transport.check_digests()
    layer(other, 4)
    with pytest.raises(torch.OutOfMemoryError) if rank == 1 else nullcontext():
        fails(transport, rank)
    other.timeout = BRIEF
    for _ in range(2):
        with pytest.raises(TransportError, match=("no answer from peer 1", "no memory")[rank]):
            steps.step()
        assert torch.equal(weight, torch.zeros(3))
    for made in (other, transport, other):
        made.close()
    steps.step()
    assert torch.equal(weight, -torch.ones(3))


@on_ranks(2)
def test_an_optimizer_of_one_rank_alone_is_told_the_way_out(rank: int) -> None:
    transport = new_link()
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    steps = torch.optim.SGD([weight], lr=1.0)
    layer(transport, 4)
    transport.check_digests()
    if rank == 0:
        steps.step()  # nothing begun since then
    layer(transport, 4)
    if rank == 0:
        transport.timeout = BRIEF
        with pytest.raises(TransportError, match="or call check_digests before it, on all ranks"):
            steps.step()
    dist.barrier()
