"""Rows and cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["percent", "table_row"]


def table_row(cells: Iterable[str]) -> str:
    """``| a | b |``."""
    return f"| {' | '.join(cells)} |"


def percent(share: float | None) -> str:
    """``12.3 %``, or a dash where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"
