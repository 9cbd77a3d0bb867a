"""Colours by name."""

from __future__ import annotations

__all__ = ["color"]

_COLORS = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "faint": "#59636e",
    "blue": "#0b62c4",
    "orange": "#c25400",
    "grey": "#6e7781",
    "green": "#1a7f37",
    "purple": "#8250df",
    "teal": "#0a7a83",
    "red": "#cf222e",
    "pale": "#9cc4f0",
}


def color(name: str) -> str:
    """A colour as CSS and Vega take it."""
    return _COLORS[name]
