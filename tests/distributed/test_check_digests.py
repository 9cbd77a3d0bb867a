"""Digests of operations are compared before an optimizer step; a new shape does not synchronize."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import MismatchError, Transport, TransportError
from commfuse_npu.ops import all_gather_linear
from commfuse_npu.runtime import agreement
from tests.distributed.programs import watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT


class OwnStep(torch.optim.SGD):
    """A subclass that overrides ``step``, like the optimizers of Megatron and MindSpeed."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def link(group: Any = None, **options: Any) -> Transport:
    return Transport.create(group, lanes=2, timeout=PATIENT, **options)


def layer(made: Transport, rows: int, inputs: int = 4) -> None:
    x = torch.ones(rows, inputs, requires_grad=True)
    weight = torch.ones(3, inputs, requires_grad=True)
    all_gather_linear(x, weight, transport=made).sum().backward()


def other_length(made: Transport, rank: int) -> None:
    """Another shape with as many elements, which batches deliver because they have no tags."""
    layer(made, *((4, 4), (8, 2))[rank % 2])


def other_order(made: Transport, rank: int) -> None:
    for shape in ((8, 2), (4, 4))[:: (1, -1)[rank % 2]]:
        layer(made, *shape)


def one_more(made: Transport, rank: int) -> None:
    if rank == 0:
        made.agree("clip", {"rows": 3})


ROWS = r"all_gather_linear: .* rows: . here, . there; inputs: . here, . there"
NOTHING = r"clip: .* operation: (clip|None) here, (clip|None) there"


def stepped(rank: int, differs: Any) -> str:
    transport = link(batched=True)
    weight = torch.nn.Parameter(torch.zeros(3))
    steps = OwnStep([weight], lr=1.0)
    weight.grad = torch.ones(3)
    for shape in ((4, 4), (2, 8), (4, 4)):
        layer(transport, *shape)
    transport.agree("clip", {"rows": 2})
    steps.step()
    assert torch.equal(weight, -torch.ones(3))
    layer(transport, 4)
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
def test_a_rank_that_does_not_check_is_named(rank: int) -> None:
    transport = link(dist.new_group())
    layer(transport, 4)
    if rank == 0:
        transport.timeout = BRIEF
        words = "comparing what was begun.*no answer from peer 1"
        with pytest.raises(TransportError, match=words):
            transport.check_digests()


@on_ranks(2)
def test_a_new_length_waits_for_nobody(rank: int) -> None:
    transport, compared = link(), list[object]()
    layer(transport, 1)
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, agreement, "gather_objects", lambda value, *_: compared.append(value))
        for rows in range(2, 32):
            layer(transport, rows)
        assert compared == []
        for _ in range(2):
            transport.check_digests()
    # Once: nothing was begun between the two checks.
    assert compared == [(transport._operation_count, transport._digest)]
    assert len(transport._agreed) == 2
    assert (transport._operation_count, list(transport._history)) == (62, [])


@on_ranks(2)
def test_a_size_of_zero_is_another_operation(rank: int) -> None:
    """A size of 0 skips part of the work, so the ranks compare it before anything is sent."""
    transport = link()
    for sizes in ((4, 4), (5, 3)):
        transport.agree("op", dict(zip(("rows", "outputs"), sizes, strict=True)))
    with pytest.raises(
        MismatchError, match="Nothing was sent; call the same operation on all ranks"
    ):
        transport.agree("op" if rank else "another", {"rows": 5, "outputs": 0})


@on_ranks(4)
def test_several_transports_are_checked_together(rank: int) -> None:
    """Two kinds of pairs; the ranks disagree in one transport of the second kind."""
    pairs = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    groups = [group for ranks, group in pairs.items() if rank in ranks]
    tensor, replicas, closed = (link(group) for group in (groups[0], groups[1], groups[1]))
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
