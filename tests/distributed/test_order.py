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
from commfuse_npu.ops import (
    BucketOptions,
    Buckets,
    LinearOptions,
    ShardedOptions,
    all_gather_linear,
    all_to_all_linear,
    attention_all_to_all,
    attention_all_to_all_linear,
    attention_linear_reduce_scatter,
    linear_all_reduce,
    linear_all_to_all,
    linear_reduce_scatter,
    sharded_linear,
)
from commfuse_npu.plan.program import Program, Wait
from tests.distributed.programs import watch_calls
from tests.limits import PATIENT

Event = tuple[str, int, int, int]
"""``send`` or ``receive``, lane, peer, bytes."""


def column(link: Transport, options: LinearOptions) -> None:
    x = torch.ones(4, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)
    all_gather_linear(x, weight, transport=link, options=options).sum().backward()


def row(link: Transport, options: LinearOptions) -> None:
    x = torch.ones(4 * link.size, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)
    linear_reduce_scatter(x, weight, transport=link, options=options).sum().backward()


def whole(link: Transport, options: LinearOptions) -> None:
    x, weight = torch.ones(4 * link.size, 8), torch.ones(8, 8)
    linear_all_reduce(x, weight, transport=link, options=options)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def attention(link: Transport, options: LinearOptions) -> None:
    q, k, v = (leaf(4 * link.size, 1, 2, 4) for _ in range(3))
    attention_linear_reduce_scatter(
        q, k, v, leaf(8, 8), transport=link, causal=True, options=options
    ).sum().backward()


def heads_out(link: Transport, options: LinearOptions) -> None:
    given = leaf(4, 1, 8), leaf(8 * link.size, 8)
    linear_all_to_all(*given, transport=link, options=options).sum().backward()


def heads_back(link: Transport, options: LinearOptions) -> None:
    given = leaf(4 * link.size, 1, 8), leaf(8, 8 * link.size)
    all_to_all_linear(*given, transport=link, options=options).sum().backward()


def ulysses(link: Transport, options: LinearOptions) -> None:
    q, k, v = (leaf(4 * link.size, 1, 2, 4) for _ in range(3))
    attention_all_to_all(q, k, v, transport=link, causal=True, options=options).sum().backward()


def ulysses_linear(link: Transport, options: LinearOptions) -> None:
    q, k, v = (leaf(4 * link.size, 1, 2, 4) for _ in range(3))
    weight = leaf(8, 8 * link.size)
    attention_all_to_all_linear(
        q, k, v, weight, transport=link, causal=True, options=options
    ).sum().backward()


def sharded(link: Transport, options: LinearOptions) -> None:
    sharded_linear(
        leaf(5, 8), leaf(4, 8), transport=link, options=ShardedOptions(options.schedule)
    ).sum().backward()


def buckets(link: Transport, options: LinearOptions) -> None:
    made = Buckets(link, BucketOptions(options.schedule))
    bucket = torch.ones(8 * link.size)
    made.reduce_scatter(bucket).wait()
    made.all_gather(bucket).wait()


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
    usual = 1 if rule.startswith("bucket") else given.get("columns", 8)
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


def recorded(rank: int, call: Callable[..., None], options: LinearOptions) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    call(link, options)
    with pytest.MonkeyPatch.context() as patch:
        seen = Recorder(link, patch)
        call(link, options)
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
@pytest.mark.parametrize(
    "call",
    [
        column, row, whole, attention, heads_out, heads_back, ulysses, ulysses_linear, sharded,
        buckets,
    ],
)  # fmt: skip
def test_the_program_is_what_is_posted(ranks, call: Callable[..., None], chunks: int) -> None:
    for wgrad in ("whole", "blocks"):
        options = LinearOptions(Schedule(lanes=2, chunks=chunks), wgrad=wgrad)
        ranks(3).run(recorded, call, options)


def posted_beside(link: Transport, options: LinearOptions) -> None:
    column(link, options)
    peer = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    works = [
        dist.isend(torch.ones(1), peer[0], link.lane_groups[0]),
        dist.irecv(torch.ones(1), peer[1], link.lane_groups[0]),
    ]
    for work in works:
        link.wait_for(work)


def test_who_posts_beside_a_program_is_found(ranks) -> None:
    for outcome in ranks(3).outcomes(recorded, posted_beside, LinearOptions()):
        assert "posted beside the program" in str(outcome.error)
