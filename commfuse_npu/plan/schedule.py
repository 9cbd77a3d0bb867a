"""Schedules as data: who computes what, and what is under way on the links meanwhile.

A collective over ``N`` ranks is replaced by its own peer-to-peer transfers, and each transfer is
paired with the piece of work that it feeds (gather) or that feeds it (scatter).  A :class:`Plan`
writes that down for one rank.  It is immutable, knows neither tensors nor torch, and is read three
times: the transport carries it out, :mod:`commfuse_npu.proof.verify` proves it, a simulator times
it.

Legend: ``n`` group size, ``r`` this rank, ``c`` chunks per block.

Gathering takes the own block first, scattering makes the own block last, so that neither the first
nor the last transfer has to be waited for without work to do (CommFuse, arXiv 2604.24013)::

    gather, rank r of 4   compute | own r     | block r-1 | block r-2 | block r-3 |
                          links   | recv r-1  | recv r-2  | recv r-3  |           |

    scatter, rank r of 4  compute | for r+1   | for r+2   | for r+3   | own r     |
                          links   |           | -> r+1    | -> r+2    | -> r+3    |

A column of these drawings is a :class:`Step`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

from commfuse_npu.plan.block_order import Own, causal_costs, least_waiting

__all__ = [
    "Kind",
    "Order",
    "Own",
    "Piece",
    "Plan",
    "PlanError",
    "Schedule",
    "Shape",
    "Step",
    "Transfer",
    "split",
    "taper_down",
]

Kind = Literal["gather", "reduce_scatter", "all_to_all"]
Shape = Literal["shifted", "ring", "two_level"]
Order = Literal["block", "interleaved"]


_MOST_TAPER = 8.0
_MOST_LANES = 7
"""By default: each is a communicator with buffers of its own."""


class PlanError(ValueError):
    """A plan that cannot be built, or that :mod:`~commfuse_npu.proof.verify` refutes."""


class Piece(NamedTuple):
    """What is computed or sent: a block of the tensor, or one chunk of it.

    ``source`` is the rank that holds the block before the collective and ``target`` the rank that
    needs it after it; ``None`` stands for "every rank".  So a gathered block has no target and a
    reduced block no source.  ``chunk`` is ``None`` for the whole block: the own block is never cut,
    because nothing has to be sent of it (and small GEMMs are slow).
    """

    source: int | None
    target: int | None
    chunk: int | None

    def __str__(self) -> str:
        if self.target is None:
            name = f"block {self.source}"
        elif self.source is None:
            name = f"partial for {self.target}"
        else:
            name = f"block {self.source}->{self.target}"
        return name if self.chunk is None else f"{name} chunk {self.chunk}"


class Transfer(NamedTuple):
    """One message.  Both of its ends write down the same transfer.

    ``step`` and ``source`` give its place in the global order, which is the same on every rank.
    """

    step: int
    lane: int
    source: int
    target: int
    piece: Piece

    def __str__(self) -> str:
        return (
            f"{self.piece} from rank {self.source} to rank {self.target} "
            f"(step {self.step}, lane {self.lane})"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One column of the timeline: what is computed, and what is under way meanwhile."""

    index: int
    compute: Piece | None
    send: Transfer | None
    receive: Transfer | None


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
class Plan:
    """The part of one rank in a decomposed collective.

    Attributes:
        kind: ``gather``, ``reduce_scatter`` or ``all_to_all``.
        schedule: the options it was built with.
        rank, size: place in the group, from 0.
        own: whether the own block is computed first or last.
        steps: the timeline, in the order in which transfers are posted.
    """

    kind: Kind
    schedule: Schedule
    rank: int
    size: int
    own: Own
    steps: tuple[Step, ...]

    @property
    def chunks(self) -> int:
        return self.schedule.chunks

    @property
    def lanes(self) -> int:
        return self.schedule.lanes_for(self.size)

    @cached_property
    def transfers(self) -> tuple[Step, ...]:
        """The steps that send and receive, in posting order."""
        return tuple(step for step in self.steps if step.send is not None)

    @cached_property
    def arrival(self) -> dict[Piece, int]:
        """Index into :attr:`transfers` of the (first) message that brings a piece to this rank."""
        found: dict[Piece, int] = {}
        for position, step in enumerate(self.transfers):
            if step.receive is not None:
                found.setdefault(step.receive.piece, position)
        return found

    @property
    def forwards(self) -> bool:
        """Whether messages are passed on by ranks in between (ring) instead of sent directly."""
        return self.schedule.shape == "ring"

    @cached_property
    def window(self) -> int:
        """How many transfers may be posted ahead of the oldest one that is not yet used.

        It bounds the scratch memory: two blocks where blocks arrive, one for what arrives and one
        for what leaves where they are reduced; or one piece more than there are lanes.  A ring that
        goes round by round keeps what arrived for a whole round, a block's pieces, before it adds
        to it and passes it on.
        """
        chunks, taper = self.chunks, self.schedule.taper
        blocks = 1 if self.kind == "reduce_scatter" else 2
        least = self.lanes + 1
        if self.forwards and self.schedule.order == "block":
            least = max(least, chunks)
        if taper == 1:
            return min(len(self.transfers), max(blocks * chunks, least))
        # As many of the longest as make so many blocks together.
        shares = [taper**-chunk for chunk in range(chunks)]
        peers = max(1, self.size - 1)
        longest_first = [share / sum(shares) for share in shares for _ in range(peers)]
        window, scratch = 0, 0.0
        while window < len(longest_first) and scratch + longest_first[window] <= blocks + 1e-9:
            scratch += longest_first[window]
            window += 1
        return min(len(self.transfers), max(window, least))

    def block(self, piece: Piece) -> int:
        """Which of the ``n`` blocks of the whole tensor a computed piece belongs to."""
        gathered = self.kind == "gather" or (self.kind == "all_to_all" and self.own == "first")
        block = piece.source if gathered else piece.target
        if block is None:
            raise PlanError(
                f"{piece} names no block of a {self.kind} with the own block {self.own}"
            )
        return block

    def rows(self, piece: Piece, block_rows: int) -> slice:
        """Rows of ``piece`` in the whole tensor of ``n * block_rows`` rows."""
        start = self.block(piece) * block_rows
        inside = self.inside(piece, block_rows)
        return slice(start + inside.start, start + inside.stop)

    def inside(self, piece: Piece, block_rows: int) -> slice:
        """Rows of ``piece`` inside its block of ``block_rows`` rows."""
        if piece.chunk is None:
            return slice(0, block_rows)
        bounds = self._bounds(block_rows)
        return slice(bounds[piece.chunk], bounds[piece.chunk + 1])

    def slot_rows(self, slot: int, block_rows: int, window: int | None = None) -> int:
        """Rows of the longest piece among the transfers ``slot``, ``slot + window``, ...

        Args:
            window: by default :attr:`window`.
        """
        bounds = self._bounds(block_rows)
        chunks = self._slot_chunks(self.window if window is None else window)[slot]
        return max(bounds[chunk + 1] - bounds[chunk] for chunk in chunks)

    def _slot_chunks(self, window: int) -> tuple[tuple[int, ...], ...]:
        """The chunks that pass through each slot."""
        if window not in self._chunks_of_slots:
            self._chunks_of_slots[window] = tuple(
                tuple(
                    {
                        transfer.piece.chunk or 0
                        for step in self.transfers[slot::window]
                        for transfer in (step.send, step.receive)
                        if transfer is not None
                    }
                )
                for slot in range(window)
            )
        return self._chunks_of_slots[window]

    @cached_property
    def _chunks_of_slots(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {}

    def _bounds(self, block_rows: int) -> tuple[int, ...]:
        """Boundaries of the chunks of a block."""
        if self.schedule.taper == 1:
            return split(block_rows, self.chunks)
        down = taper_down(block_rows, self.chunks, self.schedule.taper)
        if self.own == "first":
            return down
        return tuple(block_rows - bound for bound in reversed(down))

    def computed_rows(self, block_rows: int) -> list[slice]:
        """The runs of rows that are computed one by one, in order: one GEMM each."""
        return [self.rows(step.compute, block_rows) for step in self.steps if step.compute]

    def draw(self) -> str:
        """The timeline as a table of text, one line per step."""
        lines = [
            f"{self.kind}, rank {self.rank} of {self.size}, {self.schedule}",
            f"{'step':>4} | {'compute':<24} | {'send':<34} | receive",
        ]
        for step in self.steps:
            send = f"{step.send.piece} -> rank {step.send.target}" if step.send else ""
            receive = (
                f"{step.receive.piece} <- rank {step.receive.source}, lane {step.receive.lane}"
                if step.receive
                else ""
            )
            lines.append(f"{step.index:>4} | {step.compute or ''!s:<24} | {send:<34} | {receive}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Schedule:
    """The options of a plan that do not depend on the rank or on the collective.

    Args:
        shape: ``shifted`` sends every block directly, at distance k in step k; ``ring`` passes
            blocks on between neighbours (for comparison: on a full mesh it uses one link only);
            ``two_level`` is direct, with the blocks of the own node first when gathering and, its
            mirror image, last when scattering, so that the slow links get the longest cover.
        lanes: how many in-order channels carry the transfers.  All transfers between a pair of
            ranks in one direction share a lane, so a lane is a link on a full mesh, and what is in
            flight at once goes to different peers.  By default :meth:`lanes_for` the group.
        chunks: pieces into which every block but the own one is cut.
        order: over (peer, chunk).  ``block`` finishes a peer before the next; ``interleaved`` takes
            chunk j of every peer before chunk j+1 of any, so that with several lanes the first
            pieces arrive early instead of all blocks together, late.
        node_size: ranks per node for ``two_level``; the group must be whole nodes.
        taper: how many times longer each chunk of a block is than the one that follows it where
            blocks arrive, and than the one before it where they are made.  With 1 all are equal.
            Little work is then left after the last transfer, and little is needed before the
            first: with 2, the rest that is exposed halves with every further piece.  Of linear
            layers only.
        costs: for ``shifted``, what computing the block of each rank takes, in times that a
            transfer of a block takes.  Blocks that cost differently (causal attention) are then
            taken in the order of distances that leaves the least waiting, see :meth:`distances`.

    Raises:
        PlanError: for a value outside its range.
    """

    shape: Shape = "shifted"
    lanes: int | None = None
    chunks: int = 1
    order: Order = "interleaved"
    node_size: int | None = None
    costs: tuple[float, ...] | None = None
    taper: float = 1.0

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("shape", self.shape, get_args(Shape)),
            ("order", self.order, get_args(Order)),
        ):
            if value not in allowed:
                raise PlanError(f"{name} {value!r} is unknown; choose one of {', '.join(allowed)}")
        for name, number in (
            ("lanes", 1 if self.lanes is None else self.lanes),
            ("chunks", self.chunks),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(f"{name} is {number!r}; it must be a whole number from 1")
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
        if not 1 <= self.taper <= _MOST_TAPER:
            raise PlanError(
                f"taper is {self.taper}; from 1 (chunks of one length) to {_MOST_TAPER:g}"
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
        return (
            f"{self.shape}, {lanes}, {self.chunks} chunks{taper}, {self.order} order{node}{costs}"
        )

    def lanes_for(self, size: int) -> int:
        """The lanes that are asked for, or else those that suit a group of ``size``.

        A lane per peer, up to 7: on a full mesh of 8 NPUs fewer leave links idle (with 2 of 7 a
        tensor-parallel layer takes longer than with plain collectives, simulated), and where all
        peers share a switch they cost little (2 % at most with 2 chunks, simulated).  A ring has
        one neighbour, and ``two_level`` a lane for the near transfers and one for the far.
        """
        if self.lanes is not None:
            return self.lanes
        default = {"ring": 1, "two_level": 2, "shifted": _MOST_LANES}[self.shape]
        return max(1, min(size - 1, default))

    def distances(self, size: int, own: Own) -> tuple[int, ...]:
        """In which order a ``shifted`` plan takes the peers, by their distance: ``1, ..., n-1``.

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

    def for_causal_blocks(self, size: int) -> Schedule:
        """With the costs of attention under a causal mask, unless there are costs already.

        Other shapes than ``shifted`` take none and stay as they are.
        """
        if self.shape != "shifted" or self.costs is not None:
            return self
        return replace(self, costs=causal_costs(size))

    def plan(self, kind: Kind, rank: int, size: int, own: Own | None = None) -> Plan:
        """The plan of ``rank`` in a group of ``size``.

        Args:
            own: for ``all_to_all`` only: ``last`` when the blocks are produced on the way out (the
                default), ``first`` when they are consumed as they come in.

        Raises:
            PlanError: unknown kind, rank outside the group, or nodes that do not fill the group.
        """
        if kind not in get_args(Kind):
            raise PlanError(f"kind {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
        if size < 1 or not 0 <= rank < size:
            raise PlanError(f"rank {rank} is outside a group of size {size}")
        if self.shape == "two_level" and self.node_size and size % self.node_size:
            raise PlanError(
                f"group size {size} is not a multiple of node_size {self.node_size}; "
                "two_level needs whole nodes, use shifted otherwise"
            )
        fixed: Own = "first" if kind == "gather" else "last"
        if own is None:
            own = fixed
        elif kind != "all_to_all" and own != fixed:
            raise PlanError(
                f"{kind} computes the own block {fixed}, not {own}: else nothing is hidden"
            )
        elif own not in get_args(Own):
            raise PlanError(f"own {own!r} is unknown; choose first or last")
        return _build(self._with_lanes(size), kind, rank, size, own)

    @lru_cache(maxsize=128)  # noqa: B019 - a schedule is a value
    def _with_lanes(self, size: int) -> Schedule:
        return self if self.lanes is not None else replace(self, lanes=self.lanes_for(size))


class _Hop(NamedTuple):
    """A transfer pair of one rank before it has its place on the timeline."""

    target: int
    sent: Piece
    source: int
    received: Piece
    lane: int


@lru_cache(maxsize=128)
def _build(schedule: Schedule, kind: Kind, rank: int, size: int, own: Own) -> Plan:
    hops = (
        _ring(schedule, kind, rank, size)
        if schedule.shape == "ring"
        else _direct(schedule, kind, rank, size, own)
    )
    own_piece = Piece(
        source=None if kind == "reduce_scatter" else rank,
        target=None if kind == "gather" else rank,
        chunk=None,
    )
    if own == "first":
        # Column i: use what hop i-1 brought, while hop i is under way.
        used = [own_piece] + [_used(hop.received, kind, rank) for hop in hops]
        moving = [*hops, None]
    else:
        # Column i: make what hop i needs, while hop i-1 is under way; the own block comes after
        # the last piece that has to be sent.
        made = [hop.sent for hop in hops if _made_here(hop.sent, rank)]
        idle = len(hops) - len(made)
        used = [*made, own_piece, *[None] * idle]
        moving = [None, *hops]
    steps = tuple(
        Step(
            index,
            compute,
            hop and Transfer(index, hop.lane, rank, hop.target, hop.sent),
            hop and Transfer(index, hop.lane, hop.source, rank, hop.received),
        )
        for index, (compute, hop) in enumerate(zip(used, moving, strict=True))
    )
    return Plan(kind, schedule, rank, size, own, steps)


def _used(piece: Piece, kind: Kind, rank: int) -> Piece | None:
    """What a rank computes with a message: nothing if it only passes it on."""
    return piece if kind == "gather" or piece.target == rank else None


def _made_here(piece: Piece, rank: int) -> bool:
    """Whether a rank computes a part of what it sends: every partial sum, and its own blocks."""
    return piece.source is None or piece.source == rank


def _direct(schedule: Schedule, kind: Kind, rank: int, size: int, own: Own) -> list[_Hop]:
    """Every piece goes straight from the rank that has it to the rank that needs it.

    Step k pairs each rank with the ranks at the k-th distance on either side: a permutation of the
    group, so each rank sends once and receives once, and no rank is the target of many.
    """
    distances = _distances(schedule, size, own)
    chunks = range(schedule.chunks)
    if schedule.order == "block":
        order = [(place, chunk) for place in range(len(distances)) for chunk in chunks]
    else:
        order = [(place, chunk) for chunk in chunks for place in range(len(distances))]
    hops = []
    for place, chunk in order:
        nodes, locals_, lane = distances[place]
        target = _shift(schedule, rank, size, nodes, locals_)
        source = _shift(schedule, rank, size, -nodes, -locals_)
        if kind == "gather":
            sent, received = Piece(rank, None, chunk), Piece(source, None, chunk)
        elif kind == "reduce_scatter":
            sent, received = Piece(None, target, chunk), Piece(None, rank, chunk)
        else:
            sent, received = Piece(rank, target, chunk), Piece(source, rank, chunk)
        hops.append(_Hop(target, sent, source, received, lane))
    return hops


def _distances(schedule: Schedule, size: int, own: Own) -> list[tuple[int, int, int]]:
    """(nodes away, places away inside the node, lane) of the peers, in the order of the steps.

    The lane follows the distance, never the step: a pair of ranks always meets on the same lane, so
    its chunks arrive in order at full rate instead of side by side at half the rate.
    """
    lanes = schedule.lanes_for(size)
    if schedule.shape == "shifted":
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
    if schedule.shape == "shifted":
        return (rank + places) % size
    node_size = schedule.node_size or size
    node, place = divmod(rank, node_size)
    return (node + nodes) % (size // node_size) * node_size + (place + places) % node_size


def _ring(schedule: Schedule, kind: Kind, rank: int, size: int) -> list[_Hop]:
    """Neighbours only.  What is not for this rank alone is passed on.

    A reduction runs downwards (to r-1) and sums on the way, so that the partials of block r are
    added in the order r-1, r-2, ..., r+1, r: the order of gloo's reduce-scatter and of the direct
    plan.  Everything else runs upwards.
    """
    rounds = range(1, size)
    up, down = (rank + 1) % size, (rank - 1) % size

    def hop(round_: int, chunk: int, offset: int = 0) -> _Hop:
        lane = chunk % schedule.lanes_for(size)
        if kind == "gather":
            sent = Piece((rank - round_ + 1) % size, None, chunk)
            return _Hop(up, sent, down, Piece((rank - round_) % size, None, chunk), lane)
        if kind == "reduce_scatter":
            sent = Piece(None, (rank + round_) % size, chunk)
            return _Hop(down, sent, up, Piece(None, (rank + round_ + 1) % size, chunk), lane)
        origin, before = (rank - round_ + 1) % size, (rank - round_) % size
        sent = Piece(origin, (origin + offset) % size, chunk)
        return _Hop(up, sent, down, Piece(before, (before + offset) % size, chunk), lane)

    chunks = range(schedule.chunks)
    if kind == "all_to_all":
        # In round t a block moves its t-th place; those for nearer ranks have arrived before.
        return [hop(t, j, offset) for t in rounds for offset in range(t, size) for j in chunks]
    if schedule.order == "block":
        return [hop(t, j) for t in rounds for j in chunks]
    return [hop(t, j) for j in chunks for t in rounds]
