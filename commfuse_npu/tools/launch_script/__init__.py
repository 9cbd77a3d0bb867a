"""Reads what a launch script would start, without starting it; torch is not imported."""

__all__ = ["UsageError"]


class UsageError(Exception):
    """The request cannot be carried out; the message says what to do instead."""
