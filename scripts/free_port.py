"""A port for the ranks of a measurement to meet at."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_PORTS = range(20000, 32000)
"""Below those that a system gives to connections: one of these would be gone before it is used."""


def free_port() -> int:
    """One that nobody on this machine listens on now.

    Raises:
        OSError: none of a hundred was free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"100 ports from {_PORTS.start} to {_PORTS.stop - 1} are all in use")
