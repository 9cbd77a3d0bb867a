"""What the host of one rank launches: operations, in order.

Two kinds: work for the compute engine, and exchanges on a lane.  The order on an engine or a lane
is the order of the list, as on a stream.  As with torch's process groups, an exchange starts after
the work that was launched before it, and work starts after the exchanges that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commfuse_npu.hardware.machine import Machine

__all__ = ["ASIDE", "COMPUTE", "Key", "Message", "Operation", "fold"]

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


class Operation(NamedTuple):
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
    seconds: float = 0.0
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()
    launches: int = 1
    posts: int = 0
    events: int = 0

    def host(self, machine: Machine) -> float:
        """Seconds for which it keeps the host."""
        return machine.host(self.launches, self.posts, self.events)


def fold(operations: Sequence[Operation]) -> list[Operation]:
    """Those of one rank, standing for all ranks of a symmetric group.

    What a rank receives in a step is the image of what it sends in that step, so the receive takes
    the message of the send.  Keys end with the rank that sends.

    Raises:
        ValueError: a step sends and receives different amounts; such a group is not symmetric.
    """
    sent = {message.key[:-1]: message for one in operations for message in one.sends}

    def image(name: str, message: Message) -> Message:
        found = sent.get(message.key[:-1])
        if found is None or found.size != message.size:
            raise ValueError(f"{name}: what is received is not the image of what is sent")
        return found

    return [
        one._replace(receives=tuple(image(one.name, message) for message in one.receives))
        for one in operations
    ]
