"""What else the machine did meanwhile: CPU time that others took, from ``/proc/stat``.

Whether a round counts is decided by this alone, never by its times: who throws away what is slow
measures what he wants.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Load", "Watch"]

_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
OTHERS_LIMIT, STEAL_LIMIT = 0.06, 0.02
"""Shares of the machine's CPU time that others, or the host of a virtual machine, may take."""


@dataclass(frozen=True)
class Load:
    """Shares of the CPU time of all cores, 0 to 1, in one round."""

    others: float
    steal: float

    @property
    def disturbed(self) -> bool:
        return self.others > OTHERS_LIMIT or self.steal > STEAL_LIMIT


class Watch:
    """Measures the load of others from its construction on.

    Args:
        stat: the file to read.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = self._read()
        self._own = sum(os.times()[:2])

    def _read(self) -> dict[str, int] | None:
        """Ticks since boot, of all cores together: the first line of the file."""
        try:
            words = self._stat.read_text().split("\n", 1)[0].split()
        except OSError:
            return None
        known = len(words) > len(_FIELDS) and words[0] == "cpu"
        return dict(zip(_FIELDS, map(int, words[1:]), strict=False)) if known else None

    def load(self, ranks_cpu_seconds: float) -> Load | None:
        """The load since; ``None`` where it cannot be told.

        Args:
            ranks_cpu_seconds: CPU time of all ranks in the same span.
        """
        after = self._read()
        if self._before is None or after is None:
            return None
        passed = {name: after[name] - self._before[name] for name in _FIELDS}
        everything = sum(passed.values())
        if everything <= 0:
            return Load(0.0, 0.0)
        ours = ranks_cpu_seconds + sum(os.times()[:2]) - self._own
        busy = passed["user"] + passed["nice"] + passed["system"]
        # Interrupts are left out: the transfers over loopback cause them.
        others = busy - ours * os.sysconf("SC_CLK_TCK")
        return Load(max(0.0, others / everything), passed["steal"] / everything)
