"""A port for the ranks of a measurement to meet at."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """One that nobody on this machine listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
