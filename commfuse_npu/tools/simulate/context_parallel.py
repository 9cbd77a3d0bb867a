"""Attention under context parallelism, on one rank of a tensor-parallel group.

With a ring, keys and values circulate while attention uses them: all rounds but the last have a
transfer to the next rank beside their attention.  With Ulysses, a rank has some rows of the
sequence for all heads, and attends with some heads over the full sequence: a blocking all-to-all
precedes attention, and another follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate.group import Group, collective_seconds
from commfuse_npu.tools.simulate.links import Links
from commfuse_npu.tools.simulate.rank import EVENTS, Rank

__all__ = ["ContextParallel"]

_ROUND = 6, 10
"""Launches per round of the ring, forward and backward: slices, attention, and the merge with the
results of earlier rounds (MindSpeed 26.1.0, counted by hand with its fused update)."""
_COPIES = 8
"""Launches beside Ulysses' attention: a copy before and after each exchange of queries, keys,
values and outputs (MindSpeed 26.1.0, counted by hand)."""


@dataclass(frozen=True)
class ContextParallel:
    """A context-parallel group.

    Attributes:
        size: number of ranks.
        ranks: of the tensor-parallel group.
        key_value: width of all keys, or of all values.
        groups: query groups of the model.
        ulysses: whether heads are exchanged instead of circulating keys.
    """

    size: int
    ranks: int
    key_value: int
    groups: int
    ulysses: bool

    def attend(self, rank: Rank, way: int, seconds: float, rows: int, qkv: int, out: int) -> None:
        """Add attention with its transfers.

        Args:
            way: 0 forward, 1 backward.
            seconds: of this rank's attention.
            rows: of this rank.
            qkv, out: widths of its queries, keys and values, and of the result.
        """
        name = ("attention", "attention backward")[way]
        if rank.variant.kind == "compute":
            rank.compute(name, seconds)
        elif self.ulysses:
            exchanges = ("qkv", rows * self._heads(qkv), 3), ("out", float(rows * out), 1)
            first, last = exchanges[:: -1 if way else 1]
            self._exchange(rank, *first)
            rank.compute(name, seconds, launches=1 + _COPIES)
            self._exchange(rank, *last)
        else:
            self._around(rank, name, seconds, rows, way)

    def _heads(self, qkv: int) -> float:
        """Width of queries, keys and values, with a key head for each of this group's ranks."""
        repeats = max(1.0, self.ranks * self.size / self.groups)
        return qkv + 2 * self.key_value * (repeats - 1) / self.ranks

    def _exchange(self, rank: Rank, name: str, numbers: float, collectives: int) -> None:
        """Deal ``numbers`` elements of every rank out to all ranks."""
        group = Group(rank.machine, self.size, self.ranks)
        seconds = collective_seconds(group, numbers / self.size * ITEM_BYTES)
        rank.need(rank.elsewhere(f"exchange of {name}", seconds, collectives))

    def _around(self, rank: Rank, name: str, seconds: float, rows: int, way: int) -> None:
        """Add the rounds of a ring; backward, gradients of keys and values go around, too."""
        passed = 1 + way
        size = float(passed * rows * 2 * self.key_value / self.ranks * ITEM_BYTES)
        transfer, waits = self._pass(rank.machine, size), tuple[int, ...]()
        for remaining in reversed(range(self.size)):
            before = waits
            if remaining:
                waits = rank.ring(transfer, before)
            rank.compute(
                name,
                seconds / self.size,
                before,
                launches=_ROUND[way],
                posts=passed,
                events=EVENTS * passed,
            )

    def _pass(self, machine: Machine, size: float) -> float:
        """Seconds to send ``size`` bytes to the next rank, on the slowest links of the ring."""
        links = Links(machine, self.size, self.ranks)
        levels = [machine.inside] if links.members_per_node > 1 else []
        if links.spans_nodes and machine.between is not None:
            levels.append(machine.between)
        return max(level.latency + size / level.rate for level in levels)
