"""Simulates posts and waits of all ranks by HCCL's rules, to find deadlocks and wrong matches.

The rules (read in torch_npu and HCCL's documentation): a lane is one communicator with one stream,
which executes posts in order.  A send and its receive happen when both are at the head of their
lanes.  Messages match by order, not by name.  The operations of a batch may happen in any order,
and the batch leaves the lane after all of them.  The first batch between two ranks on a lane opens
a link between them, and blocks each host until the other has posted; a batch with two peers waits
for both at once.

Each rank executes a script of :class:`PostBatch`, :class:`WaitForEnds` and :class:`Meet` until it
has to wait.  An action that is possible stays possible.  So the order in which ranks proceed does
not change the outcome, and a rank that blocks with open links also blocks with closed ones.
:mod:`commfuse_npu.tools.order_log.verify_log` makes scripts from the order logs of a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commfuse_npu.plan.instructions import Transfer

__all__ = [
    "Action",
    "Group",
    "Meet",
    "PostBatch",
    "Rendezvous",
    "Script",
    "Stuck",
    "TransferEnd",
    "WaitForEnds",
]


class Group(NamedTuple):
    """A group with its own lanes.  ``ranks[k]`` is the global rank of rank k of the group; ``name``
    distinguishes groups of the same ranks."""

    name: Hashable
    ranks: tuple[int, ...]


class TransferEnd(NamedTuple):
    """One end of a transfer; ``operation`` identifies the operation, equally at both ends."""

    operation: Hashable
    transfer: Transfer

    def __str__(self) -> str:
        suffix = "" if isinstance(self.operation, int) else f" of {self.operation}"
        return f"{self.transfer}{suffix}"


class PostBatch(NamedTuple):
    """Queue transfers as one batch, after this rank made ``before`` posts in the group."""

    group: Group
    lane: Hashable
    ends: tuple[TransferEnd, ...]
    before: int = 0


class WaitForEnds(NamedTuple):
    """Wait until these ends are complete."""

    ends: tuple[TransferEnd, ...]


class Meet(NamedTuple):
    """A barrier: wait until every rank of the group has reached the meeting with this number."""

    group: Group
    number: int
    name: str


Action = PostBatch | WaitForEnds | Meet


@dataclass
class Script:
    """The actions of one thread of a rank.

    Attributes:
        rank: global rank.
        open_ended: whether unknown actions may follow.
        at: index of the next action.
    """

    rank: int
    actions: Sequence[Action]
    open_ended: bool = False
    at: int = 0


class Stuck(NamedTuple):
    """Why not all scripts finish.

    ``certain`` is false if the chain of waits ends at a rank whose next actions are unknown.
    """

    text: str
    certain: bool = True


_Lane = tuple[Group, Hashable]
_Link = tuple[Group, Hashable]
"""A lane between two ranks: the group, and ``(lane, one, other)`` with their global ranks."""
_Queue = tuple[int, _Lane]
_Place = tuple[int, _Lane | None]
"""A lane of a rank, or its host (``None``)."""


class _WrongDataError(Exception):
    """A message lands where its receiver expects another one."""


class Rendezvous:
    """A simulation of scripts.

    Args:
        opened: the open links, to which the simulation adds those it opens.
    """

    def __init__(self, scripts: Sequence[Script], opened: set[_Link]) -> None:
        self._scripts = scripts
        self._opened = opened
        self._came: defaultdict[_Link, set[int]] = defaultdict(set)
        self._queues: defaultdict[_Queue, deque[list[TransferEnd]]] = defaultdict(deque)
        # Where each rank posted an end, and the ends that are complete.
        self._posted: dict[tuple[int, TransferEnd], _Queue] = {}
        self._done: set[tuple[int, TransferEnd]] = set()
        self._posts: Counter[tuple[int, Group]] = Counter()
        self._met: defaultdict[tuple[Group, int], set[int]] = defaultdict(set)

    def simulate(self) -> Stuck | None:
        """Run; ``None`` if all scripts finish and no post is left in a queue."""
        try:
            while sum(map(self._go_on, self._scripts)):
                pass
        except _WrongDataError as error:
            return Stuck(str(error))
        starts: list[_Place] = [(s.rank, None) for s in self._scripts if s.at < len(s.actions)]
        starts += sorted((place for place, batches in self._queues.items() if batches), key=str)
        chains = [self._chain(start) for start in starts]
        return next((chain for chain in chains if chain.certain), chains[0] if chains else None)

    def _go_on(self, script: Script) -> bool:
        """Act until the rank has to wait; whether it did anything."""
        began = script.at
        while script.at < len(script.actions) and self._may(script.rank, script.actions[script.at]):
            action = script.actions[script.at]
            script.at += 1
            if isinstance(action, PostBatch):
                self._post(script.rank, action)
        return script.at > began

    def _may(self, rank: int, action: Action) -> bool:
        """Whether a rank need not wait before the action; it comes to a meeting, or to a link."""
        if isinstance(action, WaitForEnds):
            return all((rank, end) in self._done for end in action.ends)
        if isinstance(action, Meet):
            met = self._met[action.group, action.number]
            met.add(rank)
            return len(met) == len(action.group.ranks)
        if self._posts[rank, action.group] < action.before:
            return False
        for link, pair, _ in self._closed(action):
            self._came[link].add(rank)
            if self._came[link] == pair:
                self._opened.add(link)
        return not any(self._closed(action))

    def _closed(self, action: PostBatch) -> Iterator[tuple[_Link, set[int], TransferEnd]]:
        """The closed links that a batch needs, each with its two ranks and the end to transfer."""
        ranks = action.group.ranks
        for end in action.ends:
            low, high = sorted((ranks[end.transfer.source], ranks[end.transfer.target]))
            link = action.group, (action.lane, low, high)
            if link not in self._opened:
                yield link, {low, high}, end

    def _post(self, rank: int, action: PostBatch) -> None:
        queue = rank, (action.group, action.lane)
        self._posted |= {(rank, end): queue for end in action.ends}
        self._posts[rank, action.group] += 1
        self._queues[queue].append(list(action.ends))
        # Complete the transfers that match, starting from the new head of a lane.
        heads = [queue] if len(self._queues[queue]) == 1 else []
        while heads:
            heads += self._settle(heads.pop())

    def _settle(self, queue: _Queue) -> Iterator[_Queue]:
        """Match the first batch of a lane with those of the peers; yields lanes with a new one."""
        rank, lane = queue
        batches = self._queues[queue]
        for end in [*batches[0]] if batches else ():
            peer = _peer(rank, lane, end)
            others = self._queues[peer]
            match = next((e for e in others[0] if _same_way(e, end)), None) if others else None
            if match is None:
                continue
            if (match.operation, match.transfer.piece) != (end.operation, end.transfer.piece):
                ends = {rank: end, peer[0]: match}
                source, target = (lane[0].ranks[at] for at in end.transfer[2:4])
                raise _WrongDataError(
                    f"wrong data: rank {source} sends {ends[source]}, and it lands where rank "
                    f"{target} expects {ends[target]}"
                )
            batches[0].remove(end)
            others[0].remove(match)
            self._done |= {(rank, end), (peer[0], match)}
            if not others[0]:
                others.popleft()
                yield peer
        if batches and not batches[0]:
            batches.popleft()
            yield queue

    # ------------------------------------------------------------------ deadlocks

    def _chain(self, place: _Place) -> Stuck:
        """Who waits for whom, from a place on, until a rank has finished or the chain is closed."""
        waits: dict[_Place, str] = {}
        while place not in waits and (wait := self._wait_of(place)) is not None:
            waits[place], place = wait
        texts = list(waits.values())
        certain = True
        if place in waits:
            texts = texts[list(waits).index(place) :]
            end = f"and so round to rank {place[0]}"
        elif any(script.open_ended for script in self._scripts if script.rank == place[0]):
            certain = False
            end = f"and nothing more is known of rank {place[0]}"
        else:
            end = f"and rank {place[0]} has nothing more to do"
        return Stuck(f"deadlock: {'; '.join(texts)}; {end}", certain)

    def _wait_of(self, place: _Place) -> tuple[str, _Place] | None:
        """What the first batch of a lane, else the host, waits for, and at which place."""
        rank, lane = place
        wanted = None
        if lane is None or not self._queues.get((rank, lane)):
            blocked = (s for s in self._scripts if s.rank == rank and s.at < len(s.actions))
            script = next(blocked, None)
            if script is None:
                return None
            action = script.actions[script.at]
            if not isinstance(action, WaitForEnds):
                absent, task = self._absent(rank, action)
                return f"rank {rank} waits for rank {absent} to {task}", (absent, None)
            wanted = next(end for end in action.ends if (rank, end) not in self._done)
            if (rank, wanted) not in self._posted:
                return f"rank {rank} waits for {wanted}, which it has not posted", (rank, None)
            _, lane = self._posted[rank, wanted]
        head = self._queues[rank, lane][0]
        end = wanted if wanted in head else head[0]
        verb = "send" if lane[0].ranks[end.transfer.source] == rank else "receive"
        before = "" if wanted in (None, end) else f", before {wanted}"
        return f"rank {rank} waits on lane {lane[1]} to {verb} {end}{before}", _peer(
            rank, lane, end
        )

    def _absent(self, rank: int, action: PostBatch | Meet) -> tuple[int, str]:
        """The rank that an action waits for, and what it has to do."""
        if isinstance(action, Meet):
            met = self._met[action.group, action.number]
            return next(r for r in action.group.ranks if r not in met), f"come to {action.name}"
        for link, pair, end in self._closed(action):
            for absent in pair - self._came[link]:
                return absent, f"open lane {action.lane} between them for {end}"
        return rank, f"post all that comes before {action.ends[0]}"


def _peer(rank: int, lane: _Lane, end: TransferEnd) -> tuple[int, _Lane]:
    """The lane at the other end of a rank's transfer."""
    source, target = (lane[0].ranks[at] for at in end.transfer[2:4])
    return (target if source == rank else source), lane


def _same_way(one: TransferEnd, other: TransferEnd) -> bool:
    """Whether two ends have the same source and target rank."""
    return one.transfer[2:4] == other.transfer[2:4]
