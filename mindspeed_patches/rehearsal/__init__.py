"""A rehearsal of Ascend trainings on a CPU: the real torch_npu over stand-ins for CANN."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """The request cannot be carried out as it was made; the message says the way out."""
