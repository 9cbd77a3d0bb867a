"""The links that a transfer uses, and their capacity.

The ranks of a group are on the NPUs ``0, stride, 2 * stride, ...``; in Megatron's rank order
tensor-parallel neighbors are adjacent and data-parallel neighbors ``tp * cp`` apart.

A message of a rank to itself stands for a transfer in another group, on links that nothing else
uses: its size is in seconds.

With ``folded`` one rank represents all: in a symmetric group every rank sends at distance k when
this one does, so the traffic into this rank equals the traffic out of it.
"""

from __future__ import annotations

from commfuse_npu.hardware.machine import Level, Machine

__all__ = ["LinkId", "Links", "PlacementError"]

LinkId = tuple[str, int, int]
"""Kind of link, and its one or two ends."""


class PlacementError(ValueError):
    """A group is not spread evenly over nodes, or spans nodes without links between them."""


class Links:
    """The links of one group.

    Args:
        size, stride: number of ranks, and distance in NPUs from one rank to the next.
        folded: whether rank 0 represents all.

    Raises:
        PlacementError: the group spans nodes, and the machine has no links between nodes, or the
            nodes hold different numbers of its ranks.
    """

    def __init__(
        self, machine: Machine, size: int, stride: int = 1, *, folded: bool = False
    ) -> None:
        self.machine, self.size, self.stride, self.folded = machine, size, stride, folded
        node = machine.npus_per_node
        self.spans_nodes = (size - 1) * stride >= node
        if self.spans_nodes:
            if machine.between is None:
                raise PlacementError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fit a node of {node} "
                    f"NPUs, and this machine has no links between nodes; choose sizes whose "
                    f"product is at most {node}"
                )
            if stride < node and (node % stride or size % (node // stride)):
                raise PlacementError(
                    f"a group of {size} ranks, {stride} NPUs apart, does not fill whole nodes of "
                    f"{node} NPUs; choose sizes whose product {node} divides, or that divides it"
                )
        self.members_per_node = max(1, node // stride) if self.spans_nodes else size
        """Ranks of the group in a node."""

    def _node(self, rank: int) -> int:
        return rank * self.stride // self.machine.npus_per_node

    def _level(self, source: int, target: int) -> Level:
        if self._node(source) == self._node(target):
            return self.machine.inside
        assert self.machine.between is not None
        return self.machine.between

    def latency(self, source: int, target: int) -> float:
        """Latency of a transfer in seconds."""
        if source == target:
            return 0.0
        return self._level(source, target).latency

    def beside_work(self, source: int, target: int) -> float:
        """Factor on the time of a transfer while one of its ends computes."""
        return self._level(source, target).beside_work

    def path(self, source: int, target: int) -> tuple[LinkId, ...]:
        """The links that a transfer occupies, from the first to the last."""
        topology = self._level(source, target).topology
        into = source if self.folded else target
        if source == target:
            return (("other group", source, 0),)
        if topology == "full_mesh":
            return (("pair", source, target),)
        if topology == "switched":
            return (("out", source, 0), ("in", into, 0))
        return (("nic-out", source, 0), ("nic-in", into, 0))

    def capacity(self, link: LinkId) -> float:
        """Bandwidth of a link in bytes/s that is available to the group."""
        if link[0] == "other group":
            return 1.0
        if link[0] in ("pair", "out", "in"):
            return self.machine.inside.rate
        assert self.machine.between is not None
        return self.machine.between.rate
