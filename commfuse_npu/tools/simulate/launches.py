"""The operations that the host of one rank launches, in order.

There are two kinds: work on a compute engine, and exchanges on a lane.  Operations on an engine or
a lane run in the order of the list, as on a stream.  As with torch's process groups, an exchange
starts after the work that was launched before it, and work starts after the exchanges that it waits
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commfuse_npu.hardware.machine import Machine

__all__ = ["ASIDE", "COMPUTE", "Key", "Message", "Operation", "fold"]

COMPUTE, ASIDE = "compute", "aside"
"""The engines: the first stream of a device, and the side stream."""

Key = tuple[object, ...]


class Message(NamedTuple):
    """One transfer; both of its ends refer to the same message.

    ``size`` is in bytes; ``delay`` is in seconds, added to the time of latency and links.
    """

    key: Key
    source: int
    target: int
    size: float
    delay: float = 0.0


class Operation(NamedTuple):
    """One launch.

    Attributes:
        engine: ``compute``, ``aside``, a lane's name, or ``None`` for an operation without order.
        seconds: work at full speed; 0 for exchanges.
        sends, receives: messages; the operation is complete when all of them are.
        after: indices of operations of the same rank that must complete first.
        launches: number of host launches; 0 inside a kernel or a collective.
        posts: number of point-to-point batches that the host posts.
        events: number of events that are recorded or that a stream waits for.
    """

    name: str
    engine: str | None
    seconds: float = 0.0
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()
    launches: int = 1
    posts: int = 0
    events: int = 0

    def host(self, machine: Machine) -> float:
        """Seconds of host time."""
        return machine.host(self.launches, self.posts, self.events)


def fold(operations: Sequence[Operation]) -> list[Operation]:
    """The operations of one rank, changed to represent all ranks of a symmetric group.

    In each step a rank receives the counterpart of what it sends, so the receive gets the message
    of the send.  The last element of a key is the sending rank.
    """
    sent = {message.key[:-1]: message for operation in operations for message in operation.sends}
    return [
        operation._replace(receives=tuple(sent[way.key[:-1]] for way in operation.receives))
        for operation in operations
    ]
