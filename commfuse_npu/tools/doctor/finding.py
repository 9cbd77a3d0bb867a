"""One result of a check, with its severity."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Finding", "Level"]

Level = Literal["ok", "note", "warning", "error"]


class Finding(NamedTuple):
    """One result of a check.

    Attributes:
        section: versions, devices or environment.
        what: the name of what was checked.
        level: ``error``: something will not work.  ``warning``: works, but not optimally.
            ``note``: worth knowing.  ``ok``: as it should be.
        value: what was found.
        expected: what it should be; empty if nothing is expected.
        action: what to do; empty if nothing is needed.
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
