"""What is posted and awaited is the program, and nothing beside it.

The calls of torch.distributed are recorded on real ranks, with the programs that were begun; both
have to say the same, post by post and wait by wait.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import BucketOptions, Buckets, LinearOptions
from commfuse_npu.plan.instructions import Wait
from commfuse_npu.plan.program import Program
from tests.distributed.programs import watch_calls
from tests.limits import PATIENT
from tests.random_networks.case import OPS, one_layer
from tests.random_networks.network_run import Call, input_of

Event = tuple[str, int, int, int]
"""``send`` or ``receive``, lane, peer, bytes."""

FEATURES = 32
"""In and out of every layer of :func:`one_layer`."""


def called(link: Transport, op: str, options: LinearOptions) -> None:
    """Forward and backward of an op, or a bucket in either direction."""
    if op == "buckets":
        made = Buckets(link, BucketOptions(options.schedule))
        bucket = torch.ones(8 * link.size)
        made.reduce_scatter(bucket).wait()
        made.all_gather(bucket).wait()
        return
    given = {"schedule": options.schedule, "wgrad": options.wgrad, "bias": "no"}
    case = one_layer(op, link.size, **given)
    y = Call(case, link=link)(input_of(case, link=link))
    y.backward(torch.ones_like(y))


class _Counted:
    """A work that counts how often it is waited for."""

    def __init__(self, work: Any, recorder: Recorder) -> None:
        self._work, self._recorder = work, recorder

    def wait(self, *limit: Any) -> Any:
        self._recorder.waits += 1
        return self._work.wait(*limit)


class Recorder:
    """Calls of torch.distributed on the lanes of a transport, while it is entered."""

    def __init__(self, link: Transport, patch: pytest.MonkeyPatch) -> None:
        self._link = link
        self.events: list[Event] = []
        self.programs: list[Program] = []
        self.waits = 0
        isend, irecv = dist.isend, dist.irecv
        patch.setattr(dist, "isend", self._noting("send", isend))
        patch.setattr(dist, "irecv", self._noting("receive", irecv))
        watch_calls(patch, Transport, "begin", lambda _, one, *__: self.programs.append(one))

    def _noting(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            if group in self._link.lane_groups:
                lane = self._link.lane_groups.index(group)
                self.events.append((verb, lane, peer, tensor.nbytes))
                return _Counted(call(tensor, peer, group, tag), self)
            return call(tensor, peer, group, tag)

        return noted


def planned(program: Program) -> list[Event]:
    """What a program says that is posted."""
    rule, given = program.rule[0], program.arguments
    usual = 1 if rule.startswith("bucket") else given.get("columns", FEATURES)
    width = {span.buffer: usual for span in chain(*program.spans.values())}
    width |= {one.name: one.columns for one in program.scratch}
    found = []
    for post in program.posts:
        for verb, end in (("receive", post.receive), ("send", post.send)):
            if end is not None:
                peer = end.transfer.target if verb == "send" else end.transfer.source
                size = 4 * end.span.rows * width[end.span.buffer]
                found.append((verb, end.transfer.lane, peer, size))
    return found


def recorded(rank: int, op: str, options: LinearOptions, beside: bool = False) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    called(link, op, options)
    with pytest.MonkeyPatch.context() as patch:
        seen = Recorder(link, patch)
        called(link, op, options)
        if beside:
            post_beside(link)
    assert seen.programs
    expected, waits = [], 0
    for program in seen.programs:
        expected += planned(program)
        waits += sum(
            len(one.receives) + len(one.sends) for one in program.code if isinstance(one, Wait)
        )
    assert seen.events == expected, "posted beside the program"
    assert seen.waits == waits == len(expected), "every transfer is waited for once"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("op", [*OPS, "buckets"])
def test_the_program_is_what_is_posted(ranks, op: str, chunks: int) -> None:
    for wgrad in ("whole", "blocks"):
        options = LinearOptions(Schedule(lanes=2, chunks=chunks), wgrad=wgrad)
        ranks(3).run(recorded, op, options)


def post_beside(link: Transport) -> None:
    peer = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    works = [
        dist.isend(torch.ones(1), peer[0], link.lane_groups[0]),
        dist.irecv(torch.ones(1), peer[1], link.lane_groups[0]),
    ]
    for work in works:
        link.wait_for(work)


def test_who_posts_beside_a_program_is_found(ranks) -> None:
    for outcome in ranks(3).outcomes(recorded, OPS[0], LinearOptions(), True):
        assert "posted beside the program" in str(outcome.error)
