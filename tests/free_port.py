"""A port for the ranks of a test to meet at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

_PORTS = range(20000, 32000)
"""Below those that a system gives to connections: one of these would be gone before it is used."""


def free_port() -> int:
    """A port on which nobody on this machine listens now.

    Raises:
        OSError: none of a hundred was free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"100 ports from {_PORTS.start} to {_PORTS.stop - 1} are all in use")
