"""What a launch script would start, read without starting it; no torch is imported."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """The request cannot be carried out as it was made; the message says the way out."""
