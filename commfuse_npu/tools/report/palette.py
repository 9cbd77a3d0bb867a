"""Colours, dashes and marks: which variant looks like what, and no two alike in one picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["DARK", "LIGHT", "Look", "color", "looks", "on_paper"]

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "faint": "#59636e",
    "grid": "#d8dee4",
    "blue": "#0b62c4",
    "orange": "#c25400",
    "grey": "#6e7781",
    "green": "#1a7f37",
    "purple": "#8250df",
    "pink": "#bf3989",
    "teal": "#0a7a83",
    "olive": "#7d6300",
    "red": "#cf222e",
    "pale": "#9cc4f0",
    "shade": "#e7ebef",
}
DARK = {
    "paper": "#12161b",
    "ink": "#e6edf3",
    "faint": "#a2adb9",
    "grid": "#343c45",
    "blue": "#58a6ff",
    "orange": "#f0883e",
    "grey": "#9aa4ae",
    "green": "#4ac26b",
    "purple": "#b392f0",
    "pink": "#f778ba",
    "teal": "#39c5cf",
    "olive": "#d4b106",
    "red": "#ff6b63",
    "pale": "#2f5f96",
    "shade": "#232a32",
}
"""By name; a contrast of 4.5 to the paper, and 3 for lines and surfaces."""

_KNOWN = {"plain-mesh": "grey", "plain": "grey", "p2p": "grey", "megatron": "orange"}
_OTHERS = ("green", "purple", "pink", "teal", "olive", "orange", "grey")
_OURS = ("blue", "teal", "purple", "green", "pink", "olive")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right",
           "triangle-left")  # fmt: skip
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4])


class Look(NamedTuple):
    """Of a line: the name of its colour, Vega's mark, and lengths on and off, in pixels."""

    color: str
    shape: str
    dash: tuple[int, ...]


def color(name: str) -> str:
    """A colour as CSS, so that a page in the dark replaces it; see :func:`on_paper`."""
    return f"var(--{name})"


def on_paper(text: str) -> str:
    """With the light colours themselves in place of :func:`color`, for files without CSS."""
    return re.sub(r"var\(--([a-z]+)\)", lambda found: LIGHT[found[1]], text)


def looks(names: Sequence[str], ours: Iterable[str] = ()) -> dict[str, Look]:
    """One for each name; no two are the same.  Ours are solid first, and in blue."""
    mine, taken, found = set(ours), set[Look](), dict[str, Look]()
    for name in names:
        known = [_KNOWN[name]] if name in _KNOWN else []
        hues = [*known, *(_OURS if name in mine else _OTHERS)]
        dashes = _DASHES if name in mine else (*_DASHES[1:], _DASHES[0])
        free = [
            look
            for shape in _SHAPES
            for dash in dashes
            for hue in hues
            if (look := Look(hue, shape, tuple(dash))) not in taken
        ]
        if not free:
            raise ValueError(f"{len(names)} lines are more than can be told apart in one picture")
        # Together they are its own, as a legend shows them; as long as there are any, each is: not
        # everybody sees colours.
        hued, shaped = {look.color for look in taken}, {look.shape for look in taken}
        pairs = {look[:2] for look in taken}
        found[name] = min(
            free,
            key=lambda one: (one[:2] in pairs, (one.color in hued) + (one.shape in shaped)),
        )
        taken.add(found[name])
    return found
