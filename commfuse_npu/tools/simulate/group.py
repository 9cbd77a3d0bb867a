"""Simulates the ranks of a group together, or one rank that represents all if they do the same.

Cost of the simulation: a symmetric group costs as much as one rank, whatever its size; a group with
fused programs is simulated rank by rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.operations import Links, fold
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant

_Build = Callable[[Rank], None]
"""Adds to the launches of a rank."""


def simulate(
    links: Links,
    variant: Variant,
    build: _Build,
    *,
    whole: bool | None = None,
    steady: bool = False,
) -> Simulated:
    """Simulate what ``build`` adds to the launches of every rank.

    Args:
        links: of the group.
        whole: whether to simulate every rank; by default if they do different work.  Otherwise
            a middle rank represents all: it has GEMMs before and after its own block.
        steady: whether this is one of many in a row, between which the host does not wait.  It
            is then ahead of the device, unless launching takes longer than the launched work.
    """
    if variant.tuned:
        variant = _tuned(links, variant, build, steady)
    if whole is None:
        # Ranks in the middle have blocks on both sides of their own.
        whole = variant.kind == "fused" and links.size > 2
    ranks = range(links.size) if whole else [links.size // 2]
    launches = [_built(links, variant, build, rank).finish() for rank in ranks]
    if not whole:
        launches = [fold(launches[0])]
    return Simulated(launches, replace(links, folded=not whole), steady=steady)


def _built(links: Links, variant: Variant, build: _Build, rank: int) -> Rank:
    """One rank with its launches."""
    built = Rank(links, rank, variant)
    build(built)
    return built


def _tuned(links: Links, variant: Variant, build: _Build, steady: bool) -> Variant:
    """Choose the fastest way for each operation in turn, the others fixed as chosen so far.

    One operation may hide the transfers of another, so the total time decides.
    """

    def seconds(variant: Variant) -> float:
        # One rank is enough for the choice.
        return simulate(links, variant, build, whole=False, steady=steady).seconds

    choices = [replace(variant, way=way, tuned=()) for way in variant.tuned]
    fastest = min(choices, key=seconds)
    ways = _built(links, fastest, build, 0).ways
    # A single operation has been tried in every way but by collectives in Megatron's order.
    others = (*(variant.tuned if len(ways) > 1 else ()), None)
    for operation, usual in ways.items():
        tried = (
            replace(fastest, chosen=(*fastest.chosen, (operation, way)))
            for way in others
            if way != usual
        )
        fastest = min(fastest, *tried, key=seconds)
    return fastest


@lru_cache(1 << 14)
def collective_seconds(links: Links, size: float) -> float:
    """Seconds of a plain collective on its own, with ``size`` bytes per block."""
    return simulate(links, REFERENCE, lambda rank: rank.need(rank.collective("", size))).seconds
