"""What ends a rehearsal before it starts: the message names the problem and the way out."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """The request cannot be carried out as it was made."""
