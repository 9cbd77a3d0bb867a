"""What a rank began, in order, so that the ranks can compare it without waiting for each other.

Everything enters a digest.  On gloo the digest of every stretch of operations is sent to the other
ranks, and looked at when the next stretch is over, so that it has arrived long before.  While
transfers are under way it is not looked at: another rank may need them before it sends its own::

    begun    | stretch 0      | stretch 1      | stretch 2      | step of the optimizer
    sent     |                | 0              | 1              | 2, and the last operations
    compared |                |                | 0              | 1, 2, and the last operations

The last operations are kept in full, to say in what the ranks differ.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from commfuse_npu.runtime.roll_call import Swap

__all__ = ["Ledger", "Signature", "mismatch"]

Signature = tuple[tuple[str, Hashable], ...]
"""An operation: ``("operation", name)``, then whatever else has to be the same on all ranks."""

_STRETCH = 64
_KEPT = 4 * _STRETCH
_TAG = 1
"""Of the digests; comparisons that are waited for have 0."""


class Ledger:
    """What was begun on the lanes of one group.

    Args:
        control: the group for comparisons.

    Attributes:
        entered: how many operations.
        digest: of all of them, in order; below 2^63.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.entered = 0
        self.digest = 0
        self._control = control
        # Single messages of HCCL open communicators of their own, in the middle of a forward.
        self._sends = dist.get_backend(control) == "gloo"
        self._kept: deque[Signature] = deque(maxlen=_KEPT)
        self._sent: deque[Swap] = deque()

    def enter(self, identity: int, signature: Signature) -> bool:
        """Another operation; whether a digest is to be sent, or an older one to be compared."""
        self.entered += 1
        self.digest = (self.digest * 6364136223846793005 + identity) & 0x7FFFFFFFFFFFFFFF
        self._kept.append(signature)
        return self._sends and (not self.entered % _STRETCH or len(self._sent) > 1)

    def send(self) -> None:
        """Send the digest to the other ranks, if a stretch is over.

        Raises:
            MissingRankError: the connection to a rank is gone.
        """
        if not self.entered % _STRETCH:
            mine = torch.tensor([self.entered, self.digest])
            theirs = {
                peer: torch.empty_like(mine)
                for peer in range(self._control.size())
                if peer != self._control.rank()
            }
            self._sent.append(Swap(mine, theirs, self._control, _TAG))

    def compare(self, timeout: timedelta, *, newest: bool = True) -> bool:
        """Wait for the other ranks' digests; whether all of them were the same.

        Args:
            newest: also for that which was sent last.

        Raises:
            MissingRankError: a rank is a whole stretch behind for so long, or gone.
        """
        end = time.monotonic() + timeout.total_seconds()
        while len(self._sent) > (not newest):
            sent = self._sent.popleft()
            if any(not torch.equal(sent.mine, other) for other in sent.wait(end).values()):
                return False
        return True

    def settled(self) -> None:
        """All ranks have the same; what they began does not have to be kept any more."""
        self._kept.clear()

    @property
    def kept(self) -> tuple[int, list[Signature]]:
        """The number of the first operation that is kept, and those from there on."""
        return self.entered - len(self._kept), list(self._kept)

    def difference(
        self, everyone: Sequence[tuple[int, list[Signature]]], *, all_begun: bool
    ) -> str | None:
        """The first operation that is another one on another rank, as far as they are kept.

        Args:
            everyone: :attr:`kept` of every rank.
            all_begun: whether a rank that began less than another differs from it.
        """
        found = []
        rank, (first, mine) = self._control.rank(), self.kept
        for peer, (their_first, theirs) in enumerate(everyone):
            start = max(first, their_first)
            ends = self.entered, their_first + len(theirs)
            for number in range(start, max(ends) if all_begun else min(ends)):
                here = mine[number - first] if number < ends[0] else ()
                there = theirs[number - their_first] if number < ends[1] else ()
                if here != there:
                    found.append((number, peer, mismatch(rank, here, peer, there)))
                    break
        if not found:
            return None
        number, _, words = min(found)
        return (
            f"{words}. This was operation {number} of the transport, and what came since then is "
            "wrong; call it alike on all ranks"
        )


def mismatch(rank: int, here: Signature, peer: int, there: Signature) -> str:
    """In what two operations differ."""
    mine, theirs = dict(here), dict(there)
    differing = "; ".join(
        f"{what}: {mine.get(what)} here, {theirs.get(what)} there"
        for what in mine | theirs
        if mine.get(what) != theirs.get(what)
    )
    return (
        f"{(mine or theirs)['operation']}: rank {rank} and peer {peer} of the group do not call "
        f"the same: {differing}"
    )
