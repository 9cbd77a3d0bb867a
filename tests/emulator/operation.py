"""An operation on the referee's books: what a rank posted, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.emulator.messages import Communicator, Data, Post, Why


@dataclass(eq=False)
class Round:
    """One collective: the part of each rank that came to it so far."""

    agreed: str
    parts: dict[int, Operation] = field(default_factory=dict)


class Operation:
    """It waits in its rank's stream, starts at the head of it and leaves it when it is complete.

    Attributes:
        partners: for each transfer, the other end's operation and its place there, once posted.
        arrived: for each transfer, whether it took place.
        moving: it takes place right now: there is nothing left to wait for but time.
        data: what the rank sends, once read.
        asked: the rank was asked to read it.
        waiter: the thread that waits for it.
        delivered: its rank waited for it and got what it receives.
        failed: why it never completes, with the kind of the error.
    """

    def __init__(self, rank: int, post: Post) -> None:
        self.rank = rank
        self.number = post.number
        self.communicator: Communicator = post.communicator
        self.name = post.name
        self.ends = post.ends
        self.partners: list[tuple[Operation, int] | None] = [None] * len(post.ends)
        self.arrived = [False] * len(post.ends)
        self.moving: set[int] = set()
        self.round: Round | None = None
        self.started = self.complete = self.asked = self.delivered = False
        self.data: Data | None = None if post.contributes else {}
        self.waiter: int | None = None
        self.failed: tuple[Why, str] | None = None

    def __str__(self) -> str:
        return f"{self.name} on {self.communicator}"

    def sources(self) -> list[Operation]:
        """Those whose data it receives."""
        if self.round is not None:
            return [part for part in self.round.parts.values() if part is not self]
        return [
            partner[0]
            for end, partner in zip(self.ends, self.partners, strict=True)
            if end.verb == "receive" and partner is not None
        ]
