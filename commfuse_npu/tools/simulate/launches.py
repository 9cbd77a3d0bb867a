"""What the host of one rank launches: operations, in order.

Two kinds: work for the compute engine, and exchanges on a lane.  The order on an engine or a lane
is the order of the list, as on a stream.  As with torch's process groups, an exchange starts after
the work that was launched before it, and work starts after the exchanges that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from commfuse_npu.hardware.machine import Machine

__all__ = ["ASIDE", "COMPUTE", "Key", "Launches", "Message", "Operation", "fold"]

COMPUTE, ASIDE = "compute", "aside"
"""The engines: a device's first stream, and the second one beside it."""

Key = tuple[object, ...]


class Message(NamedTuple):
    """One transfer; both of its ends write down the same message.

    ``size`` is in bytes; ``delay`` are the seconds that it takes besides latency and links.
    """

    key: Key
    source: int
    target: int
    size: float
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One launch.

    Attributes:
        engine: ``compute``, ``aside``, a lane's name, or ``None`` for what no lane keeps in order.
        seconds: work at full speed; 0 for exchanges.
        sends, receives: messages; the operation is done when all of them are.
        after: indices of operations of the same rank that have to be done before.
        launches: how many launches of the host it takes; 0 inside a kernel or a collective.
        posts: how many point-to-point batches the host posts for it.
        events: how many events it records, or makes a stream wait for.
    """

    name: str
    engine: str | None
    seconds: float
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    after: tuple[int, ...]
    launches: int
    posts: int = 0
    events: int = 0

    def host(self, machine: Machine) -> float:
        """Seconds for which it keeps the host."""
        return machine.host(self.launches, self.posts, self.events)


class Launches:
    """Built operation by operation.

    Args:
        batched: whether the send and the receive of a step complete as a unit (HCCL).  Without
            (gloo) a receive waits for no lane, and a send holds its lane until it is done.

    Attributes:
        prefix: of the keys of its messages, where two of these are put together.
    """

    def __init__(self, batched: bool = True) -> None:
        self.batched = batched
        self.operations: list[Operation] = []
        self.prefix = ""
        self._last: dict[str, int] = {}
        self._prefixes = 0

    def unique(self, name: str) -> tuple[str, int]:
        """A prefix of keys that no other operation of this rank uses; the same on every rank."""
        self._prefixes += 1
        return self.prefix + name, self._prefixes

    def compute(
        self,
        name: str,
        seconds: float,
        after: Iterable[int] = (),
        launches: int = 1,
        *,
        aside: bool = False,
        events: int = 0,
    ) -> int:
        """Add work of so many seconds that waits for what is in ``after``; returns its index."""
        engine = ASIDE if aside else COMPUTE
        added = self._add(name, engine, seconds, (), (), after, launches, 0, events)
        self._last[engine] = added
        return added

    def again(self, one: Operation, after: Iterable[int]) -> int:
        """Add an operation of another list, which waits for these of this one."""
        self.operations.append(replace(one, after=tuple(sorted(after))))
        return len(self.operations) - 1

    def last(self, *, aside: bool) -> int | None:
        """The index of the last work of a stream."""
        return self._last.get(ASIDE if aside else COMPUTE)

    def exchange(
        self,
        name: str,
        lane: str,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        after: Iterable[int] = (),
        launches: int = 1,
        posts: int = 0,
        events: int = 0,
    ) -> tuple[int, int]:
        """Add transfers on a lane; returns what is done when they are received, and when sent.

        As torch's process groups do, they start after all work that was launched before them.
        """
        needs = set(after)
        if COMPUTE in self._last:
            needs.add(self._last[COMPUTE])
        host = needs, launches, posts, events
        if self.batched:
            both = self._add(name, lane, 0.0, sends, receives, *host)
            return both, both
        received = sent = -1
        if receives:
            received = self._add(name, None, 0.0, (), receives, *host)
        if sends:
            sent = self._add(name, lane, 0.0, sends, (), *host)
        return received, sent

    def _add(
        self,
        name: str,
        engine: str | None,
        seconds: float,
        sends: Sequence[Message],
        receives: Sequence[Message],
        after: Iterable[int],
        launches: int,
        posts: int = 0,
        events: int = 0,
    ) -> int:
        self.operations.append(
            Operation(
                name,
                engine,
                seconds,
                tuple(sends),
                tuple(receives),
                tuple(sorted(after)),
                launches,
                posts,
                events,
            )
        )
        return len(self.operations) - 1


def fold(rank: Launches) -> Launches:
    """Those of one rank, standing for all ranks of a symmetric group.

    What a rank receives in a step is the image of what it sends in that step, so the receive takes
    the message of the send.  Keys end with the rank that sends.

    Raises:
        ValueError: a step sends and receives different amounts; such a group is not symmetric.
    """
    sent = {message.key[:-1]: message for op in rank.operations for message in op.sends}
    folded = Launches(rank.batched)
    for op in rank.operations:
        receives = []
        for message in op.receives:
            image = sent.get(message.key[:-1])
            if image is None or image.size != message.size:
                raise ValueError(f"{op.name}: what is received is not the image of what is sent")
            receives.append(image)
        folded.operations.append(replace(op, receives=tuple(receives)))
    return folded
