"""Programs that call functions of a test, and hooks that observe or replace running programs."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.plan import RankSpec, Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import GatherUse, Rule
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.random_networks.case import LANES


def new_link(group: dist.ProcessGroup | None = None, **options: Any) -> Transport:
    """Create a transport of two lanes, on all ranks."""
    return Transport.create(group, **{"lanes": 2, "timeout": PATIENT, **options})


@lru_cache
def _all_lanes() -> Transport:
    return new_link(lanes=LANES)


@lru_cache
def transport(lanes: int = 3) -> Transport:
    """A transport of this process, cached; a collective call.

    All share the lanes, because each process group has threads that poll.
    """
    shared = _all_lanes()
    groups = shared.lane_groups[:lanes]
    return Transport(shared.group, groups, shared.control, timeout=PATIENT)


def watch_calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]
) -> None:
    """Call ``note`` with the same arguments before each call of ``owner.name``."""
    original = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        note(*args, **named)
        return original(*args, **named)

    patch.setattr(owner, name, watched)


def match_by_order(patch: pytest.MonkeyPatch) -> None:
    """Let messages match by order, as on HCCL, which has no tags."""
    batch = dist.batch_isend_irecv

    def untagged(operations: list[dist.P2POp]) -> Any:
        return batch([dist.P2POp(p2p.op, p2p.tensor, p2p.peer, p2p.group) for p2p in operations])

    patch.setattr(dist, "batch_isend_irecv", untagged)


def watch_posts(patch: pytest.MonkeyPatch, note: Callable[..., object]) -> None:
    """Call ``note`` before each post of a program, with what is posted."""
    watch_calls(patch, dist, "batch_isend_irecv", note)


def change_programs(patch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Let transports begin ``change(program)`` in place of each compiled program."""
    compiled = Rule.program
    changed: dict[Program, Program] = {}

    def planted(self: Rule, spec: RankSpec) -> Program:
        program = compiled(self, spec)
        if program not in changed:
            changed[program] = change(program)
        return changed[program]

    patch.setattr(Rule, "program", planted)


def gather_and_use(
    transport: Transport,
    shard: torch.Tensor,
    use: Callable[[torch.Tensor, slice], object],
    lanes: int | None = None,
    shape: tuple[int, int] | None = None,
) -> None:
    """Call ``use(piece, rows)`` for every piece of the gathered ``[n * s, columns]``."""
    rows, columns = shape or shard.shape
    rule = GatherUse(rows, columns)
    running = transport.begin(rule, "gather_and_use", shard, Schedule(lanes=lanes))
    running.run(use=use, shard=shard)
