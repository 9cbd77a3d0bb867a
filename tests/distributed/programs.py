"""Programs that call functions of a test, and hooks that observe or replace running programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Post, Span
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import gather_use
from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT
from tests.random_networks.case import Network
from tests.random_networks.compare import in_full

PLAIN = Schedule()


def new_link(batched: bool | None = None, **options: Any) -> Transport:
    """Create a transport, on all ranks; ``batched=None`` takes the default of the test folder."""
    if batched is not None:
        options["batched"] = batched
    return Transport.create(lanes=3, timeout=PATIENT, **options)


@lru_cache
def transport(batched: bool | None = None) -> Transport:
    """The transport of this process, cached per ``batched``."""
    return new_link(batched)


def correct(rank: int, cases: Sequence[Network]) -> None:
    """Assert that the networks match the plain form bit for bit and fp64 within tolerance."""
    messages = in_full(rank, cases)
    assert not messages, "\n".join(messages)


def watch_posts(patch: pytest.MonkeyPatch, note: Callable[[Running, Post], object]) -> None:
    """Call ``note(running, post)`` before each post."""
    go_on = Running._go_on

    def stepwise(self: Running, works: Mapping[str, Work], end: int) -> None:
        while self._at < end:
            instruction = self.program.code[self._at]
            if isinstance(instruction, Post):
                note(self, instruction)
            go_on(self, works, self._at + 1)

    patch.setattr(Running, "_go_on", stepwise)


def watch_calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]
) -> None:
    """Call ``note`` with the same arguments before each call of ``owner.name``."""
    original = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        note(*args, **named)
        return original(*args, **named)

    patch.setattr(owner, name, watched)


def change_programs(patch: pytest.MonkeyPatch, change: Callable[[Program], Program]) -> None:
    """Let transports begin ``change(program)`` in place of each compiled program."""
    begin, changed = Transport.begin, dict[Program, Program]()

    def planted(self: Transport, program: Program, *args: Any, **keywords: Any) -> Running:
        if program not in changed:
            changed[program] = change(program)
        return begin(self, changed[program], *args, **keywords)

    patch.setattr(Transport, "begin", planted)


def view(running: Running, span: Span) -> torch.Tensor:
    """The rows of a buffer that ``span`` names in a running program."""
    return running._views[span]


def gather_and_use(
    transport: Transport,
    shard: torch.Tensor,
    use: Callable[[torch.Tensor, slice], object],
    schedule: Schedule = PLAIN,
    shape: tuple[int, int] | None = None,
) -> None:
    """Call ``use(piece, rows)`` for every piece of the gathered ``[n * s, columns]``."""
    rows, columns = shape or shard.shape
    program = gather_use(transport.spec(schedule), rows, columns, False)
    transport.begin(program, "gather_and_use", shard).run({"use": use}, shard=shard)
