"""Converters for argparse that refuse values out of range."""

from __future__ import annotations

import argparse

__all__ = ["positive", "whole"]


def whole(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return number


def positive(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


whole.__name__, positive.__name__ = "whole number", "number"  # what argparse calls them
