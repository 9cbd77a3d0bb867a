"""Tables as cells, for Markdown and for HTML alike."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Table"]


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; ``**bold**`` and `` `code` `` as in Markdown.

    Attributes:
        folded: whether it is shown only when it is asked for.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    folded: bool = False
