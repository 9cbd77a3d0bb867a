"""The rate of the link that makes communication take so many times as long as computation."""

from __future__ import annotations

__all__ = ["rate_for", "wire_seconds"]


def rate_for(ratio: float, compute_seconds: float, bytes_on_link: int) -> float | None:
    """Bytes per second; ``None``, no limit, for ratio 0.

    Args:
        ratio: wire time / computing time.
        compute_seconds: of the work without any communication, measured before.
        bytes_on_link: what goes over one link in one direction in one run of the work.

    Raises:
        ValueError: a ratio below 0, or nothing was computed or sent.
    """
    if ratio < 0:
        raise ValueError(f"the ratio of communication to computation is {ratio}; give 0 or more")
    if ratio == 0:
        return None
    if compute_seconds <= 0 or bytes_on_link <= 0:
        raise ValueError(
            f"{bytes_on_link} bytes and {compute_seconds} s of computing have no ratio"
        )
    return bytes_on_link / (ratio * compute_seconds)


def wire_seconds(bytes_per_second: float | None, bytes_on_link: int) -> float:
    """How long the link is busy at least; 0 without a limit."""
    return 0.0 if bytes_per_second is None else bytes_on_link / bytes_per_second
