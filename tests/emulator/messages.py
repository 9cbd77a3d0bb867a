"""What ranks and referee say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

EVERYONE = -1
"""In the data of a collective: for every rank of the communicator."""

Data = dict[int, bytes]
"""Of a transfer, by its place in the operation; of a collective, by rank, or for everyone."""


Why = Literal["deadlock", "mismatch", "lost", "timeout"]
"""What kind of error ends a wait."""


class Communicator(NamedTuple):
    """A group's own, one of a pair of its ranks, or the link of two ranks in the group's own, which
    their first batch opens.  Ranks are those of the job."""

    group: str
    ranks: tuple[int, ...]
    pair: bool = False
    link: bool = False

    def __str__(self) -> str:
        if self.link:
            return f"the link of ranks {self.ranks[0]} and {self.ranks[1]} in group {self.group}"
        if self.pair:
            return f"the pair communicator of ranks {self.ranks[0]} and {self.ranks[1]}"
        return f"the communicator of group {self.group} (ranks {', '.join(map(str, self.ranks))})"


class End(NamedTuple):
    """One end of a transfer."""

    verb: Literal["send", "receive"]
    peer: int
    elements: int
    dtype: str

    def __str__(self) -> str:
        to = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.elements} x {self.dtype} {to} rank {self.peer}"


@dataclass(frozen=True)
class Post:
    """A rank queues an operation: transfers, or its part in a collective.

    ``agreed`` is what all ranks of a collective have to call alike.
    """

    number: int
    communicator: Communicator
    name: str
    thread: int
    ends: tuple[End, ...] = ()
    agreed: str | None = None
    contributes: bool = True


@dataclass(frozen=True)
class Open:
    """A host opens communicators, and stands still until all ranks of each of them do.

    ``threads`` are those of the host that may still post something, this one among them.
    """

    communicators: tuple[Communicator, ...]
    thread: int
    threads: frozenset[int]
    seconds: float


@dataclass(frozen=True)
class Wait:
    """A host waits for its operation; ``data`` is what it sends, if that was not asked for yet."""

    number: int
    thread: int
    threads: frozenset[int]
    seconds: float
    data: Data | None


@dataclass(frozen=True)
class Ask:
    """Is the operation complete?  Answered at once."""

    number: int
    thread: int


@dataclass(frozen=True)
class Read:
    """The data of an operation that was asked for."""

    number: int
    data: Data


@dataclass(frozen=True)
class Ended:
    """The function that a rank ran is over; ``run`` counts the functions."""

    run: int
    error: str | None


@dataclass(frozen=True)
class Done:
    """To a thread: it may go on.  ``answer`` replies to :class:`Ask`."""

    thread: int
    data: Data
    answer: bool = True


@dataclass(frozen=True)
class Failed:
    """To a thread: what it waits for will not come."""

    thread: int
    kind: Why
    report: str


@dataclass(frozen=True)
class Fetch:
    """To a rank: read the data of this operation, somebody needs it."""

    number: int


FromRank = Post | Open | Wait | Ask | Read | Ended
ToRank = Done | Failed | Fetch
