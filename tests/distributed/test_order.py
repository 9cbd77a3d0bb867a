"""The runtime posts and awaits exactly the transfers of the program.

The calls of torch.distributed and the programs that were begun are recorded on real ranks; both
have to agree, post by post and wait by wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule, Transport
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime import executor
from tests.distributed.programs import transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks.case import (
    ATTENTION,
    OPS,
    WITH_PROJECTION,
    Bucket,
    BucketRun,
    Case,
    one_layer,
)
from tests.random_networks.compare import run_case
from tests.random_networks.network_run import Call, input_of

Event = tuple[str, int, int]
"""``send`` or ``receive``, lane, peer."""


def planned(program: Program) -> list[Event]:
    """The events that a program describes, in the order of its posts."""
    events = []
    for post in program.posts:
        for verb, end in (("receive", post.receive), ("send", post.send)):
            if end is not None:
                peer = end.transfer.target if verb == "send" else end.transfer.source
                events.append((verb, end.transfer.lane, peer))
    return events


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("op", [*OPS, "buckets"])
@on_ranks(3)
def test_the_program_is_what_is_posted(rank: int, op: str, chunks: int) -> None:
    link, schedule = Transport.create(lanes=2, timeout=PATIENT), Schedule(lanes=2, chunks=chunks)
    events, programs, waits = list[Event](), list[Program](), list[object]()

    def noting(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            events.append((verb, link.lane_groups.index(group), peer))
            work = call(group, tensors, peer, tag)
            return SimpleNamespace(wait=lambda *limit: (waits.append(work), work.wait(*limit)))

        return noted

    for wgrad in ("whole", "blocks"):
        case: Case = BucketRun(3, (Bucket(8), Bucket(8, gather=True)), schedule=schedule)
        if op != "buckets":
            case = one_layer(op, 3, schedule=schedule, wgrad=wgrad, bias="no")
        run_case(case, "fused", link)  # the ranks agree on it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "post_send", noting("send", executor.post_send))
            patch.setattr(executor, "post_receive", noting("receive", executor.post_receive))
            watch_calls(patch, Transport, "begin", lambda _, program, *__: programs.append(program))
            run_case(case, "fused", link)
    expected = [event for program in programs for event in planned(program)]
    assert expected
    assert events == expected, "posted beside the program"
    assert len(waits) == len({*map(id, waits)}) == len(expected), "each is waited for once"


CAUSAL = {"causal": True, "one document": True, "documents": False, "full": False}
"""By mask: whether later blocks of queries see more keys."""


@on_ranks(2)
def test_attention_takes_causal_blocks_in_their_order(rank: int) -> None:
    """Unless the dgrad of the projection comes first, which costs the same for every block."""
    begun: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        note = lambda _, program, *__: begun.append(program.rule[1].causal)  # noqa: E731
        watch_calls(patch, Transport, "begin", note)
        for (mask, causal), op in product(CAUSAL.items(), ATTENTION):
            begun.clear()
            case = one_layer(op, 2, mask=mask)
            y = Call(case, link=transport())(input_of(case, link=transport()))
            y.backward(torch.ones_like(y))
            assert begun == [causal, causal and op != WITH_PROJECTION], (op, mask)
