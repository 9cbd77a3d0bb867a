"""Quartiles, also of a single value."""

from collections.abc import Sequence
from statistics import quantiles

Range = tuple[float, float, float]
"""Low, typical, high."""


def quartiles(values: Sequence[float]) -> Range:
    """The lower quartile, the median and the upper quartile."""
    # Before Python 3.13, quantiles() refuses a single value.
    several = values if len(values) > 1 else [*values, *values]
    low, middle, high = quantiles(several, n=4, method="inclusive")
    return low, middle, high
