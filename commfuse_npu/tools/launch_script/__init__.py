"""Reads what a launch script would start, without starting it; torch is not imported."""

__all__ = ["NoTrainingError", "UsageError"]


class UsageError(Exception):
    """The request cannot be carried out; the message says what to do instead."""


class NoTrainingError(UsageError):
    """A script ran to its end, and started no training."""
