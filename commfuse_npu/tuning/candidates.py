"""Which schedules are worth trying."""

from __future__ import annotations

from dataclasses import replace

from commfuse_npu.plan import Schedule

__all__ = ["candidates"]

_LEAST_ROWS = 16
"""Of a piece: matrix units work on 16 rows at least."""

_EVEN = ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (6, 1.0), (8, 1.0))
_TAPERED = ((2, 1.5), (4, 2.0), (6, 1.5))
"""For two ranks.  With more, long first pieces of all peers need the memory of several blocks at
once, or hold each other up; none was ever fastest on paced links with four."""


def candidates(schedule: Schedule, size: int, block_rows: int) -> list[Schedule]:
    """Variations of ``schedule`` in lanes, chunks and taper, the simplest first.

    Args:
        schedule: its lanes are the most that may be used; shape and nodes stay.
        size: of the group.
        block_rows: rows of one rank's block.
    """
    most = min(schedule.lanes_for(size), max(1, size - 1))
    found = []
    for lanes in sorted({min(lanes, most) for lanes in (1, 2, most)}, reverse=True):
        for chunks, taper in _EVEN + (_TAPERED if size == 2 else ()):
            varied = replace(schedule, lanes=lanes, chunks=chunks, taper=taper)
            shortest = min(run.stop - run.start for run in varied.runs(block_rows, "first"))
            if chunks == 1 or shortest >= _LEAST_ROWS:
                found.append(varied)
    return found
