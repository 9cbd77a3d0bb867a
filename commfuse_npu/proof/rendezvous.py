"""Simulates posts and waits of all ranks by HCCL's rules, to find deadlocks and wrong matches.

The rules (read in torch_npu and HCCL's documentation): a lane is one communicator with one stream,
which executes posts in order.  A send and its receive happen when both are at the head of their
lanes.  Messages match by order, not by name.  The operations of a batch may happen in any order,
and the batch leaves the lane after all of them.  The first batch between two ranks on a lane opens
a link between them, and blocks each host until the other has posted; a batch with two peers waits
for both at once.

Each rank executes a script of :class:`Post`, :class:`Wait` and :class:`Meet` until it has to wait.
An action that is possible stays possible.  So the order in which ranks proceed does not change the
outcome, and a rank that blocks with open links also blocks with closed ones.
:mod:`commfuse_npu.proof.verify_log` makes scripts from the order logs of a run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commfuse_npu.plan.instructions import Transfer

__all__ = ["Action", "End", "Group", "Meet", "Post", "Rendezvous", "Script", "Stuck", "Wait"]


class Group(NamedTuple):
    """A group with its own lanes.  ``ranks[k]`` is the global rank of rank k of the group; ``name``
    distinguishes groups of the same ranks."""

    name: Hashable
    ranks: tuple[int, ...]


class End(NamedTuple):
    """One end of a transfer; ``operation`` identifies the operation, equally at both ends."""

    operation: Hashable
    transfer: Transfer

    def __str__(self) -> str:
        suffix = "" if isinstance(self.operation, int) else f" of {self.operation}"
        return f"{self.transfer}{suffix}"


class Post(NamedTuple):
    """Queue transfers as one batch, after this rank made ``before`` posts in the group."""

    group: Group
    lane: Hashable
    ends: tuple[End, ...]
    before: int = 0


class Wait(NamedTuple):
    """Wait until these ends are complete."""

    ends: tuple[End, ...]


class Meet(NamedTuple):
    """A barrier: wait until every rank of the group has reached the meeting with this number."""

    group: Group
    number: int
    name: str


Action = Post | Wait | Meet


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


class Rendezvous:
    """A simulation of scripts.

    Args:
        opened: the open links, to which the simulation adds those it opens; ``None``: all are open.
    """

    def __init__(self, scripts: Sequence[Script], *, opened: set[_Link] | None = None) -> None:
        self._scripts = scripts
        self._cold = opened is not None
        self._opened = opened if opened is not None else set()
        self._came: dict[_Link, set[int]] = defaultdict(set)
        self._queues: dict[_Queue, deque[list[End]]] = defaultdict(deque)
        self._done: set[tuple[int, End]] = set()
        self._where: dict[tuple[int, End], _Queue] = {}
        self._posted: dict[tuple[int, Group], int] = defaultdict(int)
        self._met: dict[tuple[Group, int], set[int]] = defaultdict(set)
        self._held: dict[Hashable, list[int]] = defaultdict(list)
        self._ready = deque(range(len(scripts)))

    def simulate(self) -> Stuck | None:
        """Run; ``None`` if all scripts finish and no post is left in a queue."""
        while self._ready:
            number = self._ready.popleft()
            script = self._scripts[number]
            while script.at < len(script.actions):
                action = script.actions[script.at]
                obstacle = self._holds(script.rank, action)
                if obstacle is not None:
                    self._held[obstacle].append(number)
                    break
                script.at += 1
                if isinstance(action, Post):
                    stuck = self._post(script.rank, action)
                    if stuck is not None:
                        return stuck
        return self._stuck()

    def _free(self, what: Hashable) -> None:
        self._ready.extend(self._held.pop(what, ()))

    def _holds(self, rank: int, action: Action) -> Hashable | None:
        """What this rank has to wait for before the action; ``None`` if it may act."""
        if isinstance(action, Wait):
            open_ends = (end for end in action.ends if (rank, end) not in self._done)
            return next(((rank, end) for end in open_ends), None)
        if isinstance(action, Meet):
            meeting = action.group, action.number
            self._met[meeting].add(rank)
            if len(self._met[meeting]) < len(action.group.ranks):
                return meeting
            self._free(meeting)
            return None
        if self._posted[rank, action.group] < action.before:
            return "turn", rank, action.group
        if not self._cold:
            return None
        for link, pair, _ in self._closed(action):
            self._came[link].add(rank)
            if self._came[link] == pair:
                self._opened.add(link)
                self._free(link)
        return next((link for link, *_ in self._closed(action)), None)

    def _closed(self, action: Post) -> Iterator[tuple[_Link, set[int], End]]:
        """The closed links that a batch needs, each with its two ranks and the end to transfer."""
        ranks = action.group.ranks
        for end in action.ends:
            low, high = sorted((ranks[end.transfer.source], ranks[end.transfer.target]))
            link = action.group, (action.lane, low, high)
            if link not in self._opened:
                yield link, {low, high}, end

    def _post(self, rank: int, action: Post) -> Stuck | None:
        queue = rank, (action.group, action.lane)
        self._queues[queue].append(list(action.ends))
        for end in action.ends:
            self._where[rank, end] = queue
        self._posted[rank, action.group] += 1
        self._free(("turn", rank, action.group))
        return self._settle(queue) if len(self._queues[queue]) == 1 else None

    def _settle(self, changed: _Queue) -> Stuck | None:
        """Complete the transfers that match, starting from the new head of a queue."""
        todo = [changed]
        while todo:
            rank, lane = queue = todo.pop()
            entries = self._queues[queue]
            if not entries:
                continue
            ranks = lane[0].ranks
            for end in list(entries[0]):
                source, target = ranks[end.transfer.source], ranks[end.transfer.target]
                peer = (target if source == rank else source), lane
                peer_entries = self._queues.get(peer)
                if not peer_entries:
                    continue
                sends = source == rank
                match = next((e for e in peer_entries[0] if _same_way(e, end)), None)
                if match is None:
                    continue
                same = (match.operation, match.transfer.piece) == (
                    end.operation,
                    end.transfer.piece,
                )
                if not same:
                    sent, expected = (end, match) if sends else (match, end)
                    return Stuck(
                        f"wrong data: rank {source} sends {sent}, and it lands where rank "
                        f"{target} expects {expected}"
                    )
                entries[0].remove(end)
                peer_entries[0].remove(match)
                for owner, posted in ((rank, end), (peer[0], match)):
                    self._done.add((owner, posted))
                    self._free((owner, posted))
                if not peer_entries[0]:
                    peer_entries.popleft()
                    todo.append(peer)
            if not entries[0]:
                entries.popleft()
                todo.append(queue)
        return None

    # ------------------------------------------------------------------ deadlocks

    def _stuck(self) -> Stuck | None:
        """The chain of ranks that wait for each other; ``None`` if all have finished."""
        starts: list[_Place] = [(p.rank, None) for p in self._scripts if p.at < len(p.actions)]
        queues = ((rank, lane) for (rank, lane), entries in self._queues.items() if entries)
        starts += sorted(queues, key=str)
        if not starts:
            return None
        chains = [self._chain(start) for start in starts]
        return next((chain for chain in chains if chain.certain), chains[0])

    def _chain(self, start: _Place) -> Stuck:
        waits: dict[_Place, str] = {}
        place, wait = start, self._wait_of(start)
        while wait is not None and wait[0] not in waits:
            waits[wait[0]], place = wait[1:]
            wait = self._wait_of(place)
        texts, certain = list(waits.values()), True
        if wait is not None:
            texts = texts[list(waits).index(wait[0]) :]
            end = f"and so round to rank {wait[0][0]}"
        elif any(p.open_ended for p in self._scripts if p.rank == place[0]):
            certain, end = False, f"and nothing more is known of rank {place[0]}"
        else:
            end = f"and rank {place[0]} has nothing more to do"
        state = "cold" if self._cold else "warm"
        return Stuck(f"deadlock ({state}): {'; '.join(texts)}; {end}", certain)

    def _wait_of(self, place: _Place) -> tuple[_Place, str, _Place] | None:
        """Who waits at a place (head of a lane, else the host), in words, and for which place."""
        rank, lane = place
        host, wanted = (rank, None), None
        if lane is None or not self._queues.get((rank, lane)):
            scripts = (p for p in self._scripts if p.rank == rank and p.at < len(p.actions))
            script = next(scripts, None)
            if script is None:
                return None
            action = script.actions[script.at]
            if not isinstance(action, Wait):
                absent, task = self._absent(rank, action)
                return host, f"rank {rank} waits for rank {absent} to {task}", (absent, None)
            wanted = next(end for end in action.ends if (rank, end) not in self._done)
            if (rank, wanted) not in self._where:
                return host, f"rank {rank} waits for {wanted}, which it has not posted", host
            _, lane = self._where[rank, wanted]
        queue, (group, number) = (rank, lane), lane
        head = self._queues[queue][0]
        end = head[0] if wanted is None or wanted not in head else wanted
        source, target = group.ranks[end.transfer.source], group.ranks[end.transfer.target]
        verb, peer = ("send", target) if source == rank else ("receive", source)
        words = f"rank {rank} waits on lane {number} to {verb} {end}"
        if wanted is not None and wanted is not end:
            words += f", before {wanted}"
        return queue, words, (peer, lane)

    def _absent(self, rank: int, action: Post | Meet) -> tuple[int, str]:
        """The rank that an action waits for, and what it has to do."""
        if isinstance(action, Meet):
            met = self._met[action.group, action.number]
            return next(r for r in action.group.ranks if r not in met), f"come to {action.name}"
        closed = ((pair - self._came[link], end) for link, pair, end in self._closed(action))
        default = rank, action.ends[0]
        absent, end = next(((r, end) for ranks, end in closed for r in ranks), default)
        return absent, f"open lane {action.lane} between them for {end}"


def _same_way(one: End, other: End) -> bool:
    """Whether two ends have the same source and target rank."""
    first, second = one.transfer, other.transfer
    return (first.source, first.target) == (second.source, second.target)
