"""One thing that doctor or plan looked at, and how bad it is."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Finding", "Level"]

Level = Literal["ok", "note", "warning", "error"]


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        section: versions, devices, environment or launch.
        what: the name of the thing.
        level: ``error``: something will not work.  ``warning``: works, but not as it could.
            ``note``: worth knowing.  ``ok``: as it should be.
        value: what was found.
        expected: what it should be; empty if there is nothing to expect.
        action: what to do; empty if there is nothing to do.
    """

    section: str
    what: str
    level: Level
    value: str
    expected: str = ""
    action: str = ""

    def __str__(self) -> str:
        expected = f"; expected {self.expected}" if self.expected else ""
        action = f" -> {self.action}" if self.action else ""
        return f"{self.level:<7}  {self.what}: {self.value}{expected}{action}"
