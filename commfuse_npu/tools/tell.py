"""What somebody who watches a terminal sees: what is being computed."""

from __future__ import annotations

import sys

__all__ = ["tell"]


def tell(what: str) -> None:
    """Say it in one line of stderr that is written over; an empty text wipes it.

    Nothing is said where stderr is no terminal.
    """
    if sys.stderr.isatty():
        print(f"\r{what[:79]:<79}\r", end="", file=sys.stderr, flush=True)
