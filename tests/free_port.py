"""A free port for the rendezvous of the ranks of a test."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

_PORTS = range(20000, 32000)
"""Below the ephemeral ports, which the system may assign to a connection at any time."""


def free_port() -> int:
    """A port that no process of this machine uses at this moment.

    Raises:
        OSError: none of 100 random ports was free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"100 ports from {_PORTS.start} to {_PORTS.stop - 1} are all in use")
