"""A Gantt chart of a layer: work of a rank, transfers on its links, and waiting.

It shows the rank in the middle, or the one that represents all.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter

from commfuse_npu.tools.drawing import Bit, Chart, Row, gantt
from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.variants import Variant

_LANES = {COMPUTE: "compute", ASIDE: "2nd stream"}
_LINKS = "links"
_INSTANT = 1e-9


def layer_picture(step: Step, variants: Mapping[str, Variant]) -> Chart:
    """A Gantt chart of one layer in each of these variants."""
    rows = [lanes(title, step.parts(variant)) for title, variant in variants.items()]
    return gantt("One layer, forward and backward", "ms, typical figures; lower is better", rows)


def lanes(title: str, parts: Sequence[Simulated]) -> Row:
    """The parts in sequence, in ms.

    Overlapping transfers are drawn as one bar.  Waiting is time in which the first stream is idle.
    """
    bits: list[Bit] = []
    begin = 0.0

    def add(lane: str, start: float, end: float, kind: str) -> None:
        if end - start > _INSTANT or kind != "waiting":
            bits.append(Bit(lane, 1e3 * (begin + start), 1e3 * (begin + end), kind))

    for simulated in parts:
        at = 0.0
        for span in simulated.spans:
            lane = _LANES.get(span.operation.engine or "")
            if lane is None or span.rank != simulated.shown_rank or span.start == span.end:
                continue
            if span.operation.engine == COMPUTE:
                add(lane, at, span.start, "waiting")
                at = span.end
            add(lane, span.start, span.end, "work")
        add(_LANES[COMPUTE], at, simulated.seconds, "waiting")
        for start, end in _transfers(simulated):
            add(_LINKS, start, end, "transfer")
        begin += simulated.seconds
    waited = sum(bit.end - bit.start for bit in bits if bit.kind == "waiting")
    used = {bit.lane for bit in bits}
    label = f"{title}: {1e3 * begin:.1f} ms, waiting {waited:.1f} ms"
    return Row(label, tuple(row for row in (*_LANES.values(), _LINKS) if row in used), tuple(bits))


def _transfers(simulated: Simulated) -> list[tuple[float, float]]:
    """Start and end of the bars of a rank's transfers."""
    bars: list[tuple[float, float]] = []
    for moved in sorted(simulated.moved, key=attrgetter("start", "end")):
        if simulated.links.folded or moved.message.source == simulated.shown_rank:
            start, end = moved.start, moved.end
            if bars and start < bars[-1][1]:
                start, until = bars.pop()
                end = max(until, end)
            bars.append((start, end))
    return bars
