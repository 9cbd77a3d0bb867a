"""What a rank sent and received, in the order in which it posted it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Posted", "Recording", "ReplayError"]


class ReplayError(RuntimeError):
    """What is run alone is not what was run together."""


@dataclass
class Posted:
    """A transfer, or a rank's part in a collective.

    Attributes:
        what: ``send to 3``, ``receive from 1``, or the name of a collective.
        sent: copies of what was read, made when it was posted.
        received: copies of what was written, made when it was waited for; empty until then.
    """

    what: str
    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor] = ()


class Recording:
    """Of one run of one rank, by process group."""

    def __init__(self) -> None:
        self._posted: defaultdict[str, list[Posted]] = defaultdict(list)
        self._read: Counter[str] = Counter()

    def add(self, group: str, posted: Posted) -> Posted:
        """Another one of a group."""
        self._posted[group].append(posted)
        return posted

    def rewind(self) -> None:
        """Read from the start again."""
        self._read.clear()

    def next(self, group: str, what: str, like: Sequence[torch.Tensor]) -> Posted:
        """The following one of a group.

        Args:
            what: see :class:`Posted`.
            like: what it writes now.

        Raises:
            ReplayError: something else was posted there, of other shapes, or nothing.
        """
        number, posted = self._read[group], self._posted[group]
        if number == len(posted):
            raise ReplayError(
                f"{what} is operation {number} of group {group}; {len(posted)} were recorded. Run "
                "alone what was run together"
            )
        found = posted[number]
        shapes, known = _shapes(like), _shapes(found.received)
        if (found.what, known) != (what, shapes):
            raise ReplayError(
                f"operation {number} of group {group} is {what} of {shapes}; recorded was "
                f"{found.what} of {known}. Run alone what was run together"
            )
        self._read[group] += 1
        return found

    def left(self) -> list[str]:
        """What was recorded and not run again."""
        return [
            f"{one.what}, operation {number} of group {group}"
            for group, posted in self._posted.items()
            for number, one in enumerate(posted[self._read[group] :], self._read[group])
        ]


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    return [(*tensor.shape, tensor.dtype) for tensor in tensors]
