"""Faults on purpose, and what every rank says then."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """See :mod:`scripts.evidence.faults.command`, which the ranks need not import."""
    from scripts.evidence.faults import command

    return command.main(argv)
