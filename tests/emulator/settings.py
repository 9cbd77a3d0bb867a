"""What can be turned on an emulated HCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """How HCCL behaves in one set of ranks.

    Attributes:
        max_delay: transfers take up to so many seconds longer, drawn from ``seed`` for each.
        seed: of the delays and of the streams.
        read_sends: when a send's buffer is read.  HCCL copies nothing at the post, so that reading
            as late as at the ``wait`` is the hardest choice; ``match`` reads as soon as both ends
            are there.
        grace: with ``wait``, how long a rank that computes may keep another one waiting for data
            whose transfer has taken place, in seconds; then the buffer is read where it is.
        streams: so many streams per rank, which all its communicators share at random; by default
            each communicator has one of its own.  HCCL's come from a pool of 32.
        repeated_peers: allow two sends, or two receives, with the same rank in one batch; older
            versions of CANN forbid it.
        timeout: the longest wait in seconds, for what the referee cannot see; a group's own time
            limit counts if it is shorter.
    """

    max_delay: float = 0.0
    seed: int = 0
    read_sends: Literal["wait", "match"] = "wait"
    grace: float = 0.05
    streams: int | None = None
    repeated_peers: bool = False
    timeout: float = 30.0
