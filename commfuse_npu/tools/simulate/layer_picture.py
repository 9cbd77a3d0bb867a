"""A Gantt chart of a layer: work of a rank, transfers on its links, and waiting.

It shows the rank in the middle, or the one that represents all.
"""

from collections.abc import Iterable, Sequence

from commfuse_npu.tools.drawing import Bit, Chart, Row, Size, gantt
from commfuse_npu.tools.simulate.engine import Simulated
from commfuse_npu.tools.simulate.operations import ASIDE, COMPUTE
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.variants import Variant

_LANES = {COMPUTE: "compute", ASIDE: "side stream"}
_LINKS = "links"
_INSTANT = 1e-9


def layer_picture(step: TrainingStep, variants: Iterable[Variant]) -> Chart:
    """A Gantt chart of one layer in each of these variants."""
    rows = [_lanes(variant.name, step.parts(variant)) for variant in variants]
    axis = "ms, typical figures; lower is better"
    return gantt("One layer, forward and backward", axis, rows, Size(18, 72, 300))


def _lanes(title: str, parts: Sequence[Simulated]) -> Row:
    """The parts in sequence, in ms.

    Waiting is time in which the first stream is idle.
    """
    bits: list[Bit] = []
    begin = 0.0

    def add(lane: str, start: float, end: float, kind: str, label: str = "") -> None:
        bits.append(Bit(lane, 1e3 * (begin + start), 1e3 * (begin + end), kind, label))

    def wait(start: float, end: float) -> None:
        if end - start > _INSTANT:
            add(_LANES[COMPUTE], start, end, "waiting", f"{1e3 * (end - start):.1f}")

    for simulated in parts:
        at = 0.0
        shown = simulated.shown_rank
        for span in simulated.spans:
            lane = _LANES.get(span.operation.engine or "")
            if lane is None or span.rank != shown or span.start == span.end:
                continue
            if span.operation.engine == COMPUTE:
                wait(at, span.start)
                at = span.end
            add(lane, span.start, span.end, "work")
        wait(at, simulated.seconds)
        everyone = simulated.links.folded
        moved = (m for m in simulated.moved if everyone or m.message.source == shown)
        for start, end in sorted({(m.start, m.end) for m in moved}):
            add(_LINKS, start, end, "transfer")
        begin += simulated.seconds
    waited = sum(bit.end - bit.start for bit in bits if bit.kind == "waiting")
    used = {bit.lane for bit in bits}
    label = f"{title}: {1e3 * begin:.1f} ms, waiting {waited:.1f} ms"
    return Row(label, tuple(row for row in (*_LANES.values(), _LINKS) if row in used), tuple(bits))
