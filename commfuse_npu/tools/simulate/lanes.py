"""A played layer as lanes for people: what one rank computes, what its links carry, when it waits.

Of all ranks the one in the middle is shown, or the one that stands for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from commfuse_npu.tools.report.charts import Bit, Row
from commfuse_npu.tools.simulate.engine import Moved, Timeline
from commfuse_npu.tools.simulate.group import Played
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE

__all__ = ["lanes"]

_LANES = {COMPUTE: "compute", ASIDE: "2nd stream"}
_LINKS = "links"
_RANK = re.compile(r" (block|partial for) \d+")


def lanes(title: str, parts: Sequence[tuple[str, Played]]) -> Row:
    """The parts one after the other, in ms.

    Transfers of an operation that overlap, to several peers, are one bit; waiting is where the
    first stream stands still.
    """
    bits: list[Bit] = []
    offset = 0.0
    for part, played in parts:
        rank, timeline = played.shown, played.timeline
        work = [span for span in timeline.spans if span.rank == rank and span.end > span.start]
        for engine, lane in _LANES.items():
            bits += [
                Bit(lane, f"{part}: {s.operation.name}", offset + s.start, offset + s.end, "work")
                for s in work
                if s.operation.engine == engine
            ]
        busy = sorted((s.start, s.end) for s in work if s.operation.engine == COMPUTE)
        for start, end in _gaps(busy, played.seconds):
            waiting = f"{part}: waiting"
            bits.append(Bit(_LANES[COMPUTE], waiting, offset + start, offset + end, "waiting"))
        for said, start, end in _transfers(timeline, rank, played.links.folded):
            bits.append(Bit(_LINKS, f"{part}: {said}", offset + start, offset + end, "transfer"))
        offset += played.seconds
    waited = sum(bit.end - bit.start for bit in bits if bit.kind == "waiting")
    used = {bit.lane for bit in bits}
    said = f"{title}: {offset * 1e3:.1f} ms, waiting {waited * 1e3:.1f} ms"
    in_ms = tuple(bit._replace(start=bit.start * 1e3, end=bit.end * 1e3) for bit in bits)
    return Row(said, tuple(one for one in (*_LANES.values(), _LINKS) if one in used), in_ms)


def _transfers(timeline: Timeline, rank: int, folded: bool) -> Iterator[tuple[str, float, float]]:
    """Names and times; of those that overlap under one name, one."""
    names = {
        message.key: span.operation.name
        for span in timeline.spans
        for message in span.operation.sends
    }
    mine: dict[str, list[Moved]] = {}
    for moved in timeline.moved:
        if folded or moved.message.source == rank:
            # To whom does not matter here: the chunk does.
            said = _RANK.sub("", names[moved.message.key])
            mine.setdefault(said, []).append(moved)
    for said, found in mine.items():
        for start, end in _merged((one.start, one.end) for one in found):
            yield said, start, end


def _merged(times: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    last: tuple[float, float] | None = None
    for start, end in sorted(times):
        if last is not None and start <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


def _gaps(busy: Iterable[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    at = 0.0
    for start, stop in [*_merged(busy), (end, end)]:
        if start - at > 1e-9:
            yield at, start
        at = max(at, stop)
