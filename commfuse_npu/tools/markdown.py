"""Rows and cells of Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table_head", "table_row"]


def table_row(cells: Iterable[str]) -> str:
    """``| a | b |``."""
    return f"| {' | '.join(cells)} |"


def table_head(cells: Sequence[str], numbers: bool = True) -> str:
    """The header row and the rule; columns after the first are right-aligned if ``numbers``."""
    return f"{table_row(cells)}\n|---{('|---:' if numbers else '|---') * (len(cells) - 1)}|"
