"""Simulates the ranks of a group together, or one rank that represents all if they do the same.

Cost of the simulation: a symmetric group costs as much as one rank, whatever its size; a group with
fused programs is simulated rank by rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from commfuse_npu.hardware.machine import Machine
from commfuse_npu.tools.simulate.engine import Timeline, simulate
from commfuse_npu.tools.simulate.launches import Links, Operation, fold
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant


@dataclass(frozen=True)
class Simulated:
    """A timeline and its inputs; ``steady``: of one of many repetitions in a row."""

    timeline: Timeline
    launches: list[list[Operation]]
    links: Links
    steady: bool

    def host(self, machine: Machine) -> float:
        """Seconds of the busiest rank's host."""
        return max(sum(operation.host(machine) for operation in rank) for rank in self.launches)

    @property
    def seconds(self) -> float:
        """Of one of many repetitions that of the device or the host, whichever is longer."""
        device = self.timeline.seconds
        return max(device, self.host(self.links.machine)) if self.steady else device

    @property
    def shown_rank(self) -> int:
        """The rank to show: the one in the middle, or the one that represents all."""
        return 0 if self.links.folded else len(self.launches) // 2


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other; :class:`~.launches.Links` defines their placement."""

    machine: Machine
    size: int
    stride: int = 1

    def simulate(
        self,
        variant: Variant,
        build: Callable[[Rank], None],
        *,
        whole: bool | None = None,
        steady: bool = False,
    ) -> Simulated:
        """Simulate what ``build`` adds to the launches of every rank.

        Args:
            whole: whether to simulate every rank; by default if they do different work.  Otherwise
                a middle rank represents all: it has GEMMs before and after its own block.
            steady: whether this is one of many in a row, between which the host does not wait.  It
                is then ahead of the device, unless launching takes longer than the launched work.
        """
        if variant.tuned:
            variant = self._tuned(variant, build, steady)
        if whole is None:
            # Ranks in the middle have blocks on both sides of their own.
            whole = variant.kind == "fused" and self.size > 2
        links = Links(self.machine, self.size, self.stride, folded=not whole)
        ranks = range(self.size) if whole else [self.size // 2]
        launches = [self._build(variant, build, rank).finish() for rank in ranks]
        if not whole:
            launches = [fold(launches[0])]
        return Simulated(simulate(launches, links, launched=steady), launches, links, steady)

    def _build(self, variant: Variant, build: Callable[[Rank], None], rank: int) -> Rank:
        """The launches of one rank, as ``build`` adds them."""
        built = Rank(Links(self.machine, self.size, self.stride), rank, variant)
        build(built)
        return built

    def _tuned(self, variant: Variant, build: Callable[[Rank], None], steady: bool) -> Variant:
        """Choose the fastest way for each operation in turn, the others fixed as chosen so far.

        One operation may hide the transfers of another, so the total time decides.
        """

        def seconds(variant: Variant) -> float:
            # One rank is enough for the choice.
            return self.simulate(variant, build, whole=False, steady=steady).seconds

        choices = [replace(variant, way=way, tuned=()) for way in variant.tuned]
        fastest = min(choices, key=seconds)
        ways = self._build(fastest, build, 0).ways
        # A single operation has been tried in every way but by collectives in Megatron's order.
        others = (*(variant.tuned if len(ways) > 1 else ()), None)
        for operation, usual in ways.items():
            tried = [(*fastest.chosen, (operation, way)) for way in others if way != usual]
            choices = [fastest, *(replace(fastest, chosen=chosen) for chosen in tried)]
            fastest = min(choices, key=seconds)
        return fastest


@lru_cache(1 << 14)
def collective_seconds(group: Group, size: float) -> float:
    """Seconds of a plain collective on its own, with ``size`` bytes per block."""
    if group.size == 1 or size <= 0:
        return 0.0
    return group.simulate(REFERENCE, lambda rank: rank.need(rank.collective("", size))).seconds
