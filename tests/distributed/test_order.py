"""What is posted and awaited is the program, and nothing beside it: random cases.

The calls of torch.distributed are recorded on real ranks, with the programs that were begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Transport
from commfuse_npu.plan.instructions import Post
from commfuse_npu.plan.program import Program
from tests.distributed.programs import watch_calls
from tests.random_networks.case import Case
from tests.random_networks.compare import at_rest_or_raise, quiet, run_case
from tests.random_networks.transports import transport_of

Event = tuple[str, int, int]
"""``send`` or ``receive``, lane, peer."""


def planned(program: Program) -> list[Event]:
    """What a program says that is posted."""
    return [
        (way, end.transfer.lane, end.transfer.target if way == "send" else end.transfer.source)
        for one in program.code
        if isinstance(one, Post)
        for way, end in one.ends
    ]


class _Counted:
    """A work that counts how often it is waited for."""

    def __init__(self, work: Any, waits: list[object]) -> None:
        self._work, self._waits = work, waits

    def wait(self, *limit: Any) -> Any:
        self._waits.append(self)
        return self._work.wait(*limit)


def beside_the_program(rank: int, case: Case) -> list[str]:
    """What was posted or awaited otherwise than the programs say."""
    case = replace(case, batched=False)
    link, events, waits = transport_of(case), list[Event](), list[object]()
    expected: list[Event] = []

    def noting(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            work = call(tensor, peer, group, tag)
            if group not in link.lane_groups:
                return work
            events.append((verb, link.lane_groups.index(group), peer))
            return _Counted(work, waits)

        return noted

    with pytest.MonkeyPatch.context() as patch, quiet():
        patch.setattr(dist, "isend", noting("send", dist.isend))
        patch.setattr(dist, "irecv", noting("receive", dist.irecv))
        watch_calls(patch, Transport, "begin", lambda _, one, *__: expected.extend(planned(one)))
        run_case(case, "fused")
    at_rest_or_raise(case)
    # Several may be under way at once.
    found = [] if sorted(events) == sorted(expected) else [f"{events}, not {expected}"]
    return found + [f"{len(waits)} waits for {len(events)}"] * (len(waits) != len(events))


def test_the_program_is_what_is_posted(random_cases: Any) -> None:
    random_cases(3, 40, seed=1114, compare=beside_the_program)
