"""The runtime posts and awaits exactly the transfers of the program.

The calls of torch.distributed and the programs that were begun are recorded on real ranks; both
have to agree, post by post and wait by wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, product
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import Buckets, LinearOptions
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime import executor
from tests.distributed.programs import transport, watch_calls
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks.case import ATTENTION, OPS, WITH_PROJECTION, one_layer
from tests.random_networks.network_run import Call, input_of

Event = tuple[str, int, int, int]
"""``send`` or ``receive``, lane, peer, bytes."""

FEATURES = 32
"""Input and output features of every layer of :func:`one_layer`."""


def called(link: Transport, op: str, options: LinearOptions) -> None:
    """Run forward and backward of an op, or a reduce-scatter and an all-gather of a bucket."""
    if op == "buckets":
        buckets = Buckets(link, LinearOptions(options.schedule))
        bucket = torch.ones(8 * link.size)
        buckets.reduce_scatter(bucket).wait()
        buckets.all_gather(bucket).wait()
        return
    settings = {"schedule": options.schedule, "wgrad": options.wgrad, "bias": "no"}
    case = one_layer(op, link.size, **settings)
    y = Call(case, link=link)(input_of(case, link=link))
    y.backward(torch.ones_like(y))


class _Counted:
    """A work that counts how often it is waited for."""

    def __init__(self, work: Any, waits: list[object]) -> None:
        self._work, self._waits = work, waits

    def wait(self, *limit: Any) -> Any:
        self._waits.append(self)
        return self._work.wait(*limit)


def planned(program: Program) -> list[Event]:
    """The events that a program describes, in the order of its posts."""
    rule, arguments = program.rule[0], program.arguments
    usual = 1 if rule.startswith("bucket") else arguments.get("columns", FEATURES)
    width = {span.buffer: usual for span in chain(*program.spans.values())}
    width |= {buffer.name: buffer.columns for buffer in program.scratch}
    events = []
    for post in program.posts:
        for verb, end in (("receive", post.receive), ("send", post.send)):
            if end is not None:
                peer = end.transfer.target if verb == "send" else end.transfer.source
                size = 4 * end.span.rows * width[end.span.buffer]
                events.append((verb, end.transfer.lane, peer, size))
    return events


def recorded(rank: int, op: str, chunks: int, wgrad: str) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    options = LinearOptions(Schedule(lanes=2, chunks=chunks), wgrad=wgrad)
    called(link, op, options)
    events: list[Event] = []
    programs: list[Program] = []
    waits: list[object] = []

    def noting(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            events.append((verb, link.lane_groups.index(group), peer, tensors[0].nbytes))
            return _Counted(call(group, tensors, peer, tag), waits)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "post_send", noting("send", executor.post_send))
        patch.setattr(executor, "post_receive", noting("receive", executor.post_receive))
        watch_calls(patch, Transport, "begin", lambda _, program, *__: programs.append(program))
        called(link, op, options)
    expected = [event for program in programs for event in planned(program)]
    assert expected
    assert events == expected, "posted beside the program"
    assert len(waits) == len(expected), "every transfer is waited for once"


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("op", [*OPS, "buckets"])
def test_the_program_is_what_is_posted(ranks, op: str, chunks: int) -> None:
    for wgrad in ("whole", "blocks"):
        ranks(3).run(recorded, op, chunks, wgrad)


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
