"""Why something is not fused, and what would change it."""

from __future__ import annotations

__all__ = ["Obstacle", "told"]


class Obstacle(str):
    """A reason, the same text as without, and beside it a way out.

    Args:
        reason: compared, hashed and counted as the text that it is.
        way_out: what a user can do; empty for nothing.
    """

    __slots__ = ("way_out",)

    way_out: str

    def __new__(cls, reason: str, way_out: str = "") -> Obstacle:
        self = super().__new__(cls, reason)
        self.way_out = way_out
        return self

    def __reduce__(self) -> tuple[type[Obstacle], tuple[str, str]]:
        return Obstacle, (str(self), self.way_out)


def told(reason: str) -> str:
    """A reason for people, with its way out if there is one."""
    way_out = getattr(reason, "way_out", "")
    return f"{reason} ({way_out})" if way_out else reason
