"""Limits the rate of every connection: emulated links between pairs of ranks, without privileges.

Linux paces what a TCP socket sends (``SO_MAX_PACING_RATE``, socket(7) and tcp(7); since 4.13
without a special queue).  gloo does not expose its sockets, but they belong to this process and are
listed under ``/proc/self/fd``.  A rate on each of them makes a full mesh: one link per pair of
ranks and direction, adjustable at run time.  A transfer then waits in the kernel's timers and costs
hardly any CPU, like a link of an accelerator.

Each process group has its own sockets, so two groups would be two links.  Forms that are
compared must therefore send all bulk data between two ranks over one group, at least in one
direction.

Congestion control is set to ``reno``, because others (bbr) set the pacing rate themselves.  Send
buffers are kept small, with and without a rate.
"""

import os
import socket
import struct
import sys

_SO_PROTOCOL = 38
_SO_MAX_PACING_RATE = 47
"""From asm-generic/socket.h; the socket module does not name them on every system."""

_SEND_BUFFER = 256 << 10
"""Send buffer in bytes.  The sending thread, which also computes, copies what fits into it: with
the megabytes that Linux allows by default, the host would do the work of a network card.  gloo's
own thread copies the rest as the link accepts it."""

UNLIMITED = 2**64 - 1
"""The kernel's own value for "no limit"."""


def connected_sockets() -> list[socket.socket]:
    """Duplicates of this process's connected TCP sockets; closing them leaves the originals."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed in the meantime, as the descriptor of this listing
        try:
            connection.getpeername()
            if connection.getsockopt(socket.SOL_SOCKET, _SO_PROTOCOL) == socket.IPPROTO_TCP:
                sockets.append(connection)
                continue
        except OSError:
            pass  # no socket, or one that listens
        connection.close()
    return sockets


def pace(bytes_per_second: float | None) -> str:
    """Limit the rate of every connected TCP socket of this process; ``None`` removes the limit.

    Call it once all groups have connected, and again for new ones.

    Returns:
        Why no rate could be set, or an empty string.  It does not raise: the ranks have to agree
        first whether all of them have one.
    """
    rate = UNLIMITED if bytes_per_second is None else max(1, int(bytes_per_second))
    sockets = connected_sockets() if sys.platform.startswith("linux") else []
    if not sockets:
        return f"{sys.platform} lists no connected TCP socket under /proc/self/fd"
    try:
        for connection in sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))
            stored = connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8)
            # Kernels before 4.20 keep 32 bits; some sandboxes accept the option without effect.
            value = int.from_bytes(stored, sys.byteorder)
            if rate != UNLIMITED and value != rate:
                return f"the kernel took a pacing rate of {rate} and says {value}"
    except OSError as error:
        return f"the kernel refuses SO_MAX_PACING_RATE or reno: {error}"
    finally:
        for connection in sockets:
            connection.close()
    return ""
