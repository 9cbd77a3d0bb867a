"""A rate for every connection: links between pairs of ranks, without any privilege.

Linux paces what a TCP socket sends (``SO_MAX_PACING_RATE``, socket(7) and tcp(7); since 4.13
without a special queue).  gloo does not hand out its sockets, but they are this process's own and
listed under ``/proc/self/fd``.  Set on each, they make a full mesh: one link per pair of ranks and
direction, changeable while running.  A transfer then waits in the kernel's timers and costs hardly
any CPU, which is what a link of an accelerator is like.

Each process group has sockets of its own, so two groups would be two links: what is compared has
to send all its bulk data between two ranks over one group, in one direction at least.

Congestion control is set to ``reno``: others (bbr) set the pacing rate themselves.  Send buffers
are made small, with a rate and without one.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import dataclass

__all__ = ["UNLIMITED", "Pacing", "connected_sockets", "pace"]

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the socket module does not name it
_SEND_BUFFER = 256 << 10
"""In bytes.  What fits is copied by the thread that sends, which is the one that computes: with
the megabytes that Linux allows by itself the host does the work of a network card.  The rest is
copied by gloo's own thread as the link takes it."""

UNLIMITED = 2**64 - 1
"""The kernel's own value for "no limit"."""


@dataclass(frozen=True)
class Pacing:
    """What came of :func:`pace`.

    Attributes:
        sockets: how many have the rate now.
        problem: why there is none, or an empty string.
    """

    sockets: int
    problem: str = ""


def connected_sockets() -> list[socket.socket]:
    """Duplicates of this process's connected TCP sockets; closing them leaves the originals."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed in the meantime, or the descriptor of this very listing
        try:
            internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            if internet and duplicate.type == socket.SOCK_STREAM:
                duplicate.getpeername()
                found.append(duplicate)
                continue
        except OSError:
            pass  # it listens
        duplicate.close()
    return found


def pace(bytes_per_second: float | None) -> Pacing:
    """Give every connected TCP socket of this process a rate; ``None`` takes it away.

    Call it when all groups have connected, and again when there are new ones.  It does not raise:
    where the kernel refuses, the link is what it is, and the report has to say so.
    """
    if not sys.platform.startswith("linux"):
        return Pacing(0, f"SO_MAX_PACING_RATE is Linux's; this is {sys.platform}")
    rate = UNLIMITED if bytes_per_second is None else max(1, int(bytes_per_second))
    sockets = connected_sockets()
    if not sockets:
        return Pacing(0, "no connected TCP socket under /proc/self/fd; has the group connected?")
    try:
        for one in sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
            kept = one.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8)
            # Kernels before 4.20 keep 32 bits, some sandboxes accept the option and do nothing.
            value = int.from_bytes(kept, sys.byteorder)
            if rate != UNLIMITED and value != rate:
                return Pacing(0, f"the kernel took a pacing rate of {rate} and says {value}")
    except OSError as error:
        return Pacing(0, f"the kernel refuses SO_MAX_PACING_RATE or reno: {error}")
    finally:
        for one in sockets:
            one.close()
    return Pacing(len(sockets))
