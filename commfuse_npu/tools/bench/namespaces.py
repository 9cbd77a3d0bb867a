"""Links made of network namespaces: a network card per rank that its peers share, as root.

Every rank gets a namespace with one virtual card, and a switch (a bridge in one more namespace)
joins them.  Everything that a rank sends goes through one token bucket (``tc``'s tbf) at its card.

Nothing outside these namespaces is touched; :meth:`Network.close` removes them, and the next run
those of one that was killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess

__all__ = ["CARD", "Network", "enter", "why_not"]

CARD = "cfb0"
"""The name of every rank's card, in its own namespace."""

_NAMESPACES = "/run/netns"
_CLONE_NEWNET = 0x40000000
_BURST, _QUEUE = 128 << 10, 4 << 20  # bytes; a burst takes the largest packet of a virtual card


def why_not() -> str:
    """Why namespaces cannot be had here; an empty string if they can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no `{command}` command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"cfb{os.getpid()}probe"
    try:
        _run("ip", "netns", "add", name)
    except RuntimeError as error:
        return str(error)
    try:
        _shape(name, "lo", "1gbit")
    except RuntimeError as error:
        return str(error)
    finally:
        _run("ip", "netns", "del", name)
    return ""


def enter(name: str) -> None:
    """Move this process into a namespace; its threads and sockets from now on are in it.

    Raises:
        OSError: it is not permitted, or there is no such namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is Python 3.12's
    with open(f"{_NAMESPACES}/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns to {name}: {os.strerror(number)}")


class Network:
    """The namespaces of one group of ranks.  Use it in a ``with`` block.

    Args:
        ranks: how many.

    Raises:
        RuntimeError: a command failed; what was made before is removed.
    """

    def __init__(self, ranks: int) -> None:
        self._switch = f"cfb{os.getpid()}s"
        self.names = [f"cfb{os.getpid()}r{rank}" for rank in range(ranks)]
        self._made: list[str] = []
        self._shaped = False

    def __enter__(self) -> Network:
        _remove_left_over()
        try:
            for name in (self._switch, *self.names):
                _run("ip", "netns", "add", name)
                self._made.append(name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for rank, name in enumerate(self.names):
                port = f"port{rank}"
                _run(
                    *("ip", "-n", name, "link", "add", CARD, "type", "veth"),
                    *("peer", "name", port, "netns", self._switch),
                )
                _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
                _run("ip", "-n", name, "address", "add", f"{_address(rank)}/24", "dev", CARD)
                _run("ip", "-n", name, "link", "set", CARD, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces; the cards in them go with them."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True)

    def pace(self, bytes_per_second: float | None) -> None:
        """Give the cards a rate; ``None`` takes it away."""
        for name in self.names:
            if self._shaped:
                _run("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", CARD, "root")
            if bytes_per_second is not None:
                _shape(name, CARD, f"{max(8, round(bytes_per_second * 8))}bit")
        self._shaped = bytes_per_second is not None


def _remove_left_over() -> None:
    """Remove the namespaces of a benchmark that was killed and could not do it itself."""
    for entry in os.listdir(_NAMESPACES) if os.path.isdir(_NAMESPACES) else ():
        ours = re.fullmatch(r"cfb(\d+)(?:s|probe|r\d+)", entry)
        if ours and not os.path.exists(f"/proc/{ours[1]}"):
            subprocess.run(["ip", "netns", "del", entry], capture_output=True)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _shape(name: str, card: str, rate: str) -> None:
    _run(
        *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", card, "root", "handle", "1:"),
        *("tbf", "rate", rate, "burst", str(_BURST), "limit", str(_QUEUE)),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"`{' '.join(command)}` failed: {said[-1] if said else 'no output'}")
