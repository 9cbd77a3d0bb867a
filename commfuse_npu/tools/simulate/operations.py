"""The operations that the host of one rank launches, in order, and the links of its group.

There are two kinds of operations: work on a compute engine, and exchanges on a lane.  Those on an
engine or a lane run in the order of the list, as on a stream.  As with torch's process groups, an
exchange starts after the work that was launched before it, and work starts after the exchanges that
it waits for.

The ranks of a group are on the NPUs ``0, stride, 2 * stride, ...``; in Megatron's rank order
tensor-parallel neighbors are adjacent and data-parallel neighbors ``tp * cp`` apart.

A message of a rank to itself stands for a transfer in another group, on links that nothing else
uses: its size is in seconds.

With ``folded`` one rank represents all: in a symmetric group every rank sends at distance k when
this one does, so the traffic into this rank equals the traffic out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from commfuse_npu.tools.hardware.machine import Level, Machine

COMPUTE = "compute"
ASIDE = "aside"
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
        engine: ``compute``, ``aside`` or a lane's name.
        seconds: work at full speed; 0 for exchanges.
        sends, receives: messages; the operation is complete when all of them are.
        after: indices of operations of the same rank that must complete first.
        launches: number of host launches; 0 inside a kernel or a collective.
        posts: number of point-to-point batches that the host posts.
        events: number of events that are recorded or that a stream waits for.
    """

    name: str
    engine: str
    seconds: float = 0.0
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    after: tuple[int, ...] = ()
    launches: float = 1
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


# ------------------------------------------------------------------------ links

LinkId = tuple[str | int, ...]
"""Kind of link, and its one or two ends."""


@dataclass(frozen=True)
class Links:
    """The links of one group.

    Attributes:
        size, stride: number of ranks, and distance in NPUs from one rank to the next.
        folded: whether rank 0 represents all.

    Raises:
        ValueError: the group spans nodes, and the machine has no links between nodes, or the nodes
            hold different numbers of its ranks.
    """

    machine: Machine
    size: int
    stride: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        machine = self.machine
        size = self.size
        stride = self.stride
        node = machine.npus_per_node
        if (size - 1) * stride >= node:
            if not machine.between:
                raise ValueError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fit a node of {node} "
                    f"NPUs, and this machine has no links between nodes; choose sizes whose "
                    f"product is at most {node}"
                )
            if stride < node and (node % stride or size % (node // stride)):
                raise ValueError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fill whole nodes of "
                    f"{node} NPUs; choose sizes whose product {node} divides, or that divides it"
                )

    def level(self, source: int, target: int) -> Level:
        """The kind of links of a transfer."""
        machine = self.machine
        node = self.machine.npus_per_node
        if source == target:
            return replace(machine.inside, rate=1.0, latency=0.0)
        if source * self.stride // node == target * self.stride // node:
            return machine.inside
        assert machine.between
        return machine.between

    def path(self, source: int, target: int) -> tuple[LinkId, ...]:
        """The links that a transfer occupies, from the first to the last."""
        topology = self.level(source, target).topology
        if topology == "full_mesh" or source == target:
            return (("pair", source, target),)
        return (f"{topology}, out", source), (f"{topology}, in", source if self.folded else target)
