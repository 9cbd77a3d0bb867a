"""A group of ranks played together; one rank for all where they all do the same.

Cost: a symmetric group costs what one rank costs, whatever its size times its transfers; a group
with causal blocks, noise, slow links or stragglers is simulated rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commfuse_npu.plan import Kind, Schedule
from commfuse_npu.tools.simulate.disturbance import Disturbance
from commfuse_npu.tools.simulate.engine import Timeline, simulate
from commfuse_npu.tools.simulate.links import Links
from commfuse_npu.tools.simulate.machine import Machine
from commfuse_npu.tools.simulate.program import Program, fold
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import Variant, direct

__all__ = ["UNDISTURBED", "Group", "Played"]

UNDISTURBED = Disturbance()


@dataclass(frozen=True)
class Played:
    """A timeline with what it was made from."""

    timeline: Timeline
    programs: tuple[Program, ...]
    links: Links

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def waiting(self) -> float:
        """Seconds that the compute engine stood still, averaged over the ranks."""
        busy: dict[int, float] = {}
        for span in self.timeline.spans:
            if span.operation.engine == "compute":
                busy[span.rank] = busy.get(span.rank, 0.0) + span.end - span.start
        return self.seconds - sum(busy.values()) / max(1, len(self.programs))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other; see :class:`~.links.Links` for their places."""

    machine: Machine
    size: int
    stride: int = 1
    disturbance: Disturbance = UNDISTURBED

    @property
    def members_per_node(self) -> int:
        """Ranks of this group in a node."""
        return Links(self.machine, self.size, self.stride).members_per_node

    @property
    def direct(self) -> Schedule:
        """Transfers straight to every peer."""
        return direct(self.size, self.members_per_node)

    def play(
        self, variant: Variant, build: Callable[[Rank], None], *, whole: bool = False
    ) -> Played:
        """Play what ``build`` adds to the program of every rank.

        Args:
            whole: simulate every rank, even where one would do.
        """
        members = self.members_per_node

        def program(rank: int) -> Program:
            builder = Rank(self.machine, rank, self.size, members, variant)
            build(builder)
            return builder.finish()

        ring = variant.ring or (variant.schedule is not None and variant.schedule.shape == "ring")
        symmetric = self.disturbance.none and not variant.attention
        links = Links(self.machine, self.size, self.stride, folded=True)
        # On a ring over several nodes only some ranks send to another node.
        if ring and links.spans_nodes and members > 1:
            symmetric = False
        speeds = None
        if symmetric and not whole:
            programs = [fold(program(0))]
        else:
            programs = [program(rank) for rank in range(self.size)]
            slow = self.disturbance.slow(self.size)
            links = Links(self.machine, self.size, self.stride, slow=slow)
            if not self.disturbance.none:
                speeds = self.disturbance.speeds(programs)
        return Played(simulate(programs, links, speeds), tuple(programs), links)

    def collective(self, kind: Kind, block_bytes: float, variant: Variant) -> float:
        """Seconds of a plain collective by itself, over blocks of so many bytes."""
        if self.size == 1 or block_bytes <= 0:
            return 0.0

        def build(rank: Rank) -> None:
            rank.need(rank.collective(kind, kind, 1, block_bytes))

        return self.play(variant, build).seconds
