"""Schedules: in which order a rank deals with its peers, on which lanes, in how many chunks.

A collective over ``N`` ranks is replaced by its own peer-to-peer transfers, and each transfer is
paired with the piece of work that it feeds (gather) or that feeds it (scatter).  The order of the
pairs of ranks is here; what is posted, computed and added in which order is written in a
:class:`~commfuse_npu.plan.program.Program`, which a rule makes of it.

Gathering takes the own block first, scattering makes the own block last, so that neither the first
nor the last transfer has to be waited for without work to do (CommFuse, arXiv 2604.24013)::

    gather, rank r of 4   compute | own r     | block r-1 | block r-2 | block r-3 |
                          links   | recv r-1  | recv r-2  | recv r-3  |           |

    scatter, rank r of 4  compute | for r+1   | for r+2   | for r+3   | own r     |
                          links   |           | -> r+1    | -> r+2    | -> r+3    |
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from commfuse_npu.plan.block_order import Own, causal_costs, least_waiting

__all__ = [
    "Hop",
    "Own",
    "Place",
    "PlanError",
    "Schedule",
    "Shape",
    "split",
    "taper_down",
]

Shape = Literal["shifted", "two_level", "collective"]

_MOST_CHUNKS = 256
_MOST_TAPER = 8.0
_MOST_LANES = 7
"""By default: each is a communicator with buffers of its own."""


class PlanError(ValueError):
    """A schedule that cannot be, or programs that :mod:`~commfuse_npu.proof.verify` refutes."""


@lru_cache(maxsize=1024)
def split(rows: int, parts: int) -> tuple[int, ...]:
    """Boundaries ``(0, ..., rows)`` of ``parts`` runs whose lengths differ by one at most."""
    return tuple(rows * part // parts for part in range(parts + 1))


_ROW_UNIT = 16
"""Tapered pieces are whole multiples of this where rows allow: matrix units work on 16 x 16."""


@lru_cache(maxsize=1024)
def taper_down(rows: int, parts: int, taper: float) -> tuple[int, ...]:
    """Boundaries ``(0, ..., rows)`` of runs each ``taper`` times as long as the next one.

    At least a row each if there are as many, and whole multiples of 16 rows if they are.
    """
    if rows < parts:
        return split(rows, parts)
    unit = _ROW_UNIT if rows % _ROW_UNIT == 0 and rows // _ROW_UNIT >= parts else 1
    units = rows // unit
    weights = [taper ** (parts - 1 - part) for part in range(parts)]
    bounds, before, total = [0], 0.0, sum(weights)
    for part, weight in enumerate(weights, 1):
        before += weight
        wanted = round(units * (before / total))
        bounds.append(max(bounds[-1] + 1, min(wanted, units - (parts - part))))
    return tuple(bound * unit for bound in bounds)


@dataclass(frozen=True)
class Schedule:
    """The options of a program that do not depend on the rank or on the operation.

    Args:
        shape: ``shifted`` takes the peers by their distance, 1, 2, ...; ``two_level`` takes those
            of the own node first when gathering and, its mirror image, last when scattering, so
            that the slow links get the longest cover.  Every block goes straight from the rank that
            has it to the rank that needs it.  ``collective`` is ``shifted``, but a chunk travels as
            one all-gather or all-to-all in place of a batch per peer: fewer posts, on one lane, and
            all its blocks arrive at once; of tensor-parallel linear layers only.
        lanes: how many in-order channels carry the transfers.  All transfers between a pair of
            ranks in one direction share a lane, so a lane is a link on a full mesh, and what is in
            flight at once goes to different peers.  By default :meth:`lanes_for` the group.
        chunks: into how many pieces blocks, or the columns of a result, are cut.  Chunk j of every
            peer comes before chunk j+1 of any.
        node_size: ranks per node for ``two_level``; the group must be whole nodes.
        taper: how many times longer each chunk of a block is than the one that follows it where
            blocks arrive, and than the one before it where they are made.  With 1 all are equal.
            Above 1 little work is left after the last transfer, and little is needed before the
            first; below 1 chunks grow, which suits many peers and fast links.  Of linear layers
            only.
        costs: for ``shifted``, what computing the block of each rank takes, in times that a
            transfer of a block takes.  Blocks that cost differently (causal attention) are then
            taken in the order of distances that leaves the least waiting, see :meth:`distances`.

    Raises:
        PlanError: for a value outside its range.
    """

    shape: Shape = "shifted"
    lanes: int | None = None
    chunks: int = 1
    node_size: int | None = None
    costs: tuple[float, ...] | None = None
    taper: float = 1.0

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
            raise PlanError(f"lanes is {self.lanes}; a collective takes one, leave it out")
        if not 1 / _MOST_TAPER <= self.taper <= _MOST_TAPER:
            raise PlanError(
                f"taper is {self.taper}; from 1/{_MOST_TAPER:g} to {_MOST_TAPER:g}, 1 for chunks "
                "of one length"
            )
        if self.costs is not None:
            if self.shape != "shifted":
                raise PlanError(
                    f"costs have no meaning for the shape {self.shape!r}; leave them out or choose "
                    "shifted"
                )
            if not all(cost >= 0 for cost in self.costs):
                raise PlanError(f"costs are {self.costs}; none of them can be negative")

    def __str__(self) -> str:
        node = f", {self.node_size} ranks per node" if self.node_size else ""
        costs = ", blocks that cost differently" if self.costs else ""
        taper = f", tapered by {self.taper:g}" if self.taper != 1 else ""
        lanes = "a lane per peer" if self.lanes is None else f"{self.lanes} lanes"
        how = self.shape if self.shape == "collective" else f"{self.shape}, {lanes}"
        return f"{how}, {self.chunks} chunks{taper}{node}{costs}"

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __hash__(self) -> int:
        # Asked for in every call of an op.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # The hash of a text is another one in every process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def lanes_for(self, size: int) -> int:
        """The lanes that are asked for, or else those that suit a group of ``size``.

        A lane per peer, up to 7: on a full mesh of 8 NPUs fewer leave links idle (with 2 of 7 a
        tensor-parallel layer takes longer than with plain collectives, simulated), and behind a
        switch it is fastest, too, from 2 chunks on (simulated).  ``two_level`` has a lane for the
        near transfers and one for the far.
        """
        if self.lanes is not None:
            return self.lanes
        default = {"two_level": 2, "shifted": _MOST_LANES, "collective": 1}[self.shape]
        return max(1, min(size - 1, default))

    def blocks_at_once(self, size: int) -> int:
        """How many ranks' blocks a message of a chunk carries: a collective those of all."""
        return size if self.shape == "collective" else 1

    def distances(self, size: int, own: Own) -> tuple[int, ...]:
        """In which order ``shifted`` takes the peers, by their distance: ``1, ..., n-1``.

        With ``costs`` it is the order in which the rank that waits longest waits least, then all
        ranks together.

        Raises:
            PlanError: there are not as many costs as ranks.
        """
        if self.costs is None:
            return tuple(range(1, size))
        if len(self.costs) != size:
            raise PlanError(f"{len(self.costs)} costs for a group of {size}; give one per rank")
        return least_waiting(self.costs, own)

    def hops(self, rank: int, size: int, own: Own) -> tuple[Hop, ...]:
        """The peers of ``rank`` in the order in which they are dealt with.

        Hop k pairs each rank with the ranks at the k-th distance on either side: a permutation of
        the group, so each rank sends once and receives once, and no rank is the target of many.

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

    def runs(self, length: int, own: Own) -> list[slice]:
        """A block of so many rows (or columns) in chunks, no more than it has.

        Args:
            own: whether the own block is first (chunks shrink if the schedule tapers) or last (they
                grow).
        """
        parts = min(self.chunks, max(1, length))
        bounds = taper_down(length, parts, self.taper)
        if own == "last" and self.taper != 1:
            bounds = tuple(length - bound for bound in reversed(bounds))
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def for_causal_blocks(self, size: int) -> Schedule:
        """With the costs of attention under a causal mask, unless there are costs already.

        ``two_level`` takes none and stays as it is.
        """
        if self.shape == "two_level" or self.costs is not None:
            return self
        return replace(self, shape="shifted", costs=causal_costs(size))


class Hop(NamedTuple):
    """Send to ``target`` and receive from ``source``, on one lane."""

    target: int
    source: int
    lane: int


class Place(NamedTuple):
    """Whose program: a rank of a group, by a schedule.

    ``batched``: whether a send and a receive are posted as one (HCCL) or by themselves (gloo).
    """

    schedule: Schedule
    rank: int
    size: int
    batched: bool

    @property
    def together(self) -> bool:
        """Whether a chunk travels as one collective."""
        return self.schedule.shape == "collective" and self.size > 1


@lru_cache(maxsize=128)
def _hops(schedule: Schedule, rank: int, size: int, own: Own) -> tuple[Hop, ...]:
    return tuple(
        Hop(
            _shift(schedule, rank, size, nodes, places),
            _shift(schedule, rank, size, -nodes, -places),
            lane,
        )
        for nodes, places, lane in _distances(schedule, size, own)
    )


def _distances(schedule: Schedule, size: int, own: Own) -> list[tuple[int, int, int]]:
    """(nodes away, places away inside the node, lane) of the peers, in their order.

    The lane follows the distance, never the place in the order: a pair of ranks always meets on the
    same lane, so its chunks arrive in order at full rate instead of side by side at half of it.
    """
    lanes = schedule.lanes_for(size)
    if schedule.shape != "two_level":
        return [(0, k, (k - 1) % lanes) for k in schedule.distances(size, own)]
    node_size = schedule.node_size or size
    near = [(0, k, 0) for k in range(1, min(node_size, size))]
    # With two lanes or more the slow links between nodes have lanes of their own.
    far_lanes = max(1, lanes - 1)
    first_far = lanes - far_lanes
    distances = [(m, k) for m in range(1, size // node_size) for k in range(node_size)]
    far = [(m, k, first_far + i % far_lanes) for i, (m, k) in enumerate(distances)]
    return near + far if own == "first" else far + near


def _shift(schedule: Schedule, rank: int, size: int, nodes: int, places: int) -> int:
    if schedule.shape != "two_level":
        return (rank + places) % size
    node_size = schedule.node_size or size
    node, place = divmod(rank, node_size)
    return (node + nodes) % (size // node_size) * node_size + (place + places) % node_size
