"""Schedules: the order in which a rank exchanges blocks with its peers, the lanes and the chunks.

A collective over ``N`` ranks is split into peer-to-peer transfers, and each transfer is paired with
the piece of work that consumes its data (gather) or produces it (scatter).  A schedule sets the
order of the peers.  From it a rule compiles a :class:`~commfuse_npu.plan.program.Program`, which
sets the order of posts, work and sums.

A gather uses the own block first and a scatter computes the own block last, so that the first
transfer, or the last one, overlaps with work (CommFuse, arXiv 2604.24013)::

    gather, rank r of 4   compute | own r     | block r-1 | block r-2 | block r-3 |
                          links   | recv r-1  | recv r-2  | recv r-3  |           |

    scatter, rank r of 4  compute | for r+1   | for r+2   | for r+3   | own r     |
                          links   |           | -> r+1    | -> r+2    | -> r+3    |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from commfuse_npu.plan.block_order import Own, causal_costs, least_waiting

__all__ = [
    "Hop",
    "Own",
    "PlanError",
    "RankSpec",
    "Schedule",
    "Shape",
    "split",
]

Shape = Literal["shifted", "two_level", "collective"]

_MOST_CHUNKS = 256
_MOST_LANES = 7
"""Limit of the default: each lane is a communicator with its own buffers."""


class PlanError(ValueError):
    """An invalid schedule, or one that a rule does not accept."""


@lru_cache(maxsize=1024)
def split(rows: int, parts: int) -> tuple[int, ...]:
    """Boundaries ``(0, ..., rows)`` of ``parts`` runs whose lengths differ by one at most."""
    return tuple(rows * part // parts for part in range(parts + 1))


_ROW_UNIT = 16
"""Chunks are multiples of this where possible: matrix units work on tiles of 16 x 16."""


@dataclass(frozen=True)
class Schedule:
    """The options of a program that do not depend on the rank or on the operation.

    Args:
        shape: ``shifted`` orders the peers by distance, 1, 2, ...  ``two_level`` puts the peers of
            the own node first in a gather and last in a scatter, so that the slow links overlap
            with the most work.  Every block goes directly from its source to its target.
            ``collective`` is ``shifted``, but posts a chunk as one all-gather or all-to-all instead
            of a batch per peer: fewer posts, on one lane, and all its blocks arrive at once.  For
            tensor-parallel linear layers only.
        lanes: number of in-order channels for transfers.  All transfers between a pair of ranks in
            one direction share a lane, so on a full mesh a lane is a link, and transfers in flight
            at the same time have different peers.  By default :meth:`lanes_for` the group.
        chunks: number of pieces of a block, or of the columns of a result.  Chunk j of every
            peer comes before chunk j+1 of any.
        node_size: ranks per node for ``two_level``; the group must consist of whole nodes.
        causal: for ``shifted``, take the peers in the order of distances with the least waiting
            for blocks that cost as much as attention under a causal mask
            (:mod:`commfuse_npu.plan.block_order`).  Ops with attention set it.

    Raises:
        PlanError: for a value outside its range.
    """

    shape: Shape = "shifted"
    lanes: int | None = None
    chunks: int = 1
    node_size: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            shapes = ", ".join(get_args(Shape))
            raise PlanError(f"shape {self.shape!r} is unknown; choose one of {shapes}")
        for name, number in (
            ("lanes", 1 if self.lanes is None else self.lanes),
            ("chunks", self.chunks),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(f"{name} is {number!r}; it must be a whole number from 1")
        if self.chunks > _MOST_CHUNKS:
            raise PlanError(
                f"chunks is {self.chunks}; at most {_MOST_CHUNKS}, each of which every rank posts "
                "to every other one"
            )
        if self.shape == "two_level":
            if not isinstance(self.node_size, int) or self.node_size < 1:
                raise PlanError(
                    f"two_level needs node_size, the ranks of the group per node, "
                    f"not {self.node_size!r}"
                )
        elif self.node_size is not None:
            raise PlanError(
                f"node_size {self.node_size} has no meaning for the shape {self.shape!r}; "
                "leave it out or choose two_level"
            )
        if self.shape == "collective" and self.lanes not in (None, 1):
            raise PlanError(
                f"lanes is {self.lanes}; the shape collective uses one, leave lanes out"
            )
        if self.causal and self.shape != "shifted":
            raise PlanError(
                f"causal has no meaning for the shape {self.shape!r}; leave it out or choose "
                "shifted"
            )

    def __str__(self) -> str:
        node = f", {self.node_size} ranks per node" if self.node_size else ""
        causal = ", causal blocks" if self.causal else ""
        lanes = "a lane per peer" if self.lanes is None else f"{self.lanes} lanes"
        shape = self.shape if self.shape == "collective" else f"{self.shape}, {lanes}"
        return f"{shape}, {self.chunks} chunks{node}{causal}"

    def lanes_for(self, size: int) -> int:
        """Number of lanes: :attr:`lanes` if set, else the default for a group of ``size``.

        The default is a lane per peer, up to 7.  On a full mesh of 8 NPUs fewer lanes leave links
        idle: with 2 of 7 a tensor-parallel layer takes longer than with plain collectives
        (simulated).  With a switch it is also the fastest from 2 chunks on (simulated).
        ``two_level`` has one lane for transfers inside the node and one for those between nodes.
        """
        if self.lanes is not None:
            return self.lanes
        default = {"two_level": 2, "shifted": _MOST_LANES, "collective": 1}[self.shape]
        return max(1, min(size - 1, default))

    def blocks_at_once(self, size: int) -> int:
        """Number of ranks whose blocks one post of a chunk carries: all for a collective."""
        return size if self.shape == "collective" else 1

    def hops(self, rank: int, size: int, own: Own) -> tuple[Hop, ...]:
        """The peers of ``rank`` in order.

        In hop k each rank sends to the rank at the k-th distance on one side and receives from that
        on the other: a permutation of the group, so no rank is the target of several.

        Raises:
            PlanError: rank outside the group, or nodes that do not fill the group.
        """
        if size < 1 or not 0 <= rank < size:
            raise PlanError(f"rank {rank} is outside a group of size {size}")
        if self.shape == "two_level" and self.node_size and size % self.node_size:
            raise PlanError(
                f"group size {size} is not a multiple of node_size {self.node_size}; "
                "two_level needs whole nodes, use shifted otherwise"
            )
        return _hops(self, rank, size, own)

    def runs(self, length: int) -> list[slice]:
        """Cut ``length`` rows (or columns) into at most ``length`` chunks of about one length.

        Each is a multiple of 16 if ``length`` is one and each chunk can have 16.
        """
        parts = min(self.chunks, max(1, length))
        unit = _ROW_UNIT if length % _ROW_UNIT == 0 and length // _ROW_UNIT >= parts else 1
        bounds = [unit * round(length // unit * part / parts) for part in range(parts + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]


class Hop(NamedTuple):
    """A pair of peers: send to ``target`` and receive from ``source``, on one lane."""

    target: int
    source: int
    lane: int


class RankSpec(NamedTuple):
    """What a rule compiles a program for: a rank of a group and a schedule."""

    schedule: Schedule
    rank: int
    size: int

    @property
    def as_collective(self) -> bool:
        """Whether a chunk is posted as one collective."""
        return self.schedule.shape == "collective" and self.size > 1


@lru_cache(maxsize=128)
def _hops(schedule: Schedule, rank: int, size: int, own: Own) -> tuple[Hop, ...]:
    node_size = schedule.node_size or size
    nodes = size // node_size
    node, place = divmod(rank, node_size)

    def peer(m: int, k: int) -> int:
        """The rank ``m`` nodes away, and ``k`` ranks inside the node."""
        return (node + m) % nodes * node_size + (place + k) % node_size

    # The lane depends on the distance, not on the position in the order.  So a pair of ranks always
    # uses the same lane, and its chunks arrive one by one at full rate, not two at a time at half.
    lanes = schedule.lanes_for(size)
    if schedule.shape == "two_level":
        near = [(0, k, 0) for k in range(1, node_size)]
        # With two or more lanes, transfers between nodes do not share a lane with those inside.
        far_lanes = max(1, lanes - 1)
        distances = [(m, k) for m in range(1, nodes) for k in range(node_size)]
        far = [(m, k, lanes - far_lanes + i % far_lanes) for i, (m, k) in enumerate(distances)]
        order = near + far if own == "first" else far + near
    else:
        shifts = least_waiting(causal_costs(size), own) if schedule.causal else range(1, size)
        order = [(0, k, (k - 1) % lanes) for k in shifts]
    return tuple(Hop(peer(m, k), peer(-m, -k), lane) for m, k, lane in order)
