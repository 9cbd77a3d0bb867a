"""Draw docs/timeline.svg: one linear layer with its collective, sliced, and taken apart.

A drawing of the orders, not a measurement: every block of GEMM takes 1, every transfer 0.9 of it.
What CommFuse does in which order is written in commfuse_npu/plan/rules/linear.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from commfuse_npu.tools.report.charts import COLORS
from commfuse_npu.tools.report.drawing import Chart, draw_charts

RANKS = 4
TRANSFER = 0.9
_LONGEST, _WIDTH, _LINE = 7.2, 460, 32
"""Of all orders, in GEMMs of a block; pixels of a picture, and of a line of it."""

Kind = Literal["gather", "reduce_scatter"]


class Bar(NamedTuple):
    """A piece of work on one of the two lines, ``compute`` or ``links``."""

    line: str
    start: float
    length: float
    label: str


def collective(kind: Kind) -> list[Bar]:
    """One after the other."""
    wire, gemm = (RANKS - 1) * TRANSFER, float(RANKS)
    if kind == "gather":
        return [Bar("links", 0, wire, "all-gather"), Bar("compute", wire, gemm, "GEMM")]
    return [Bar("compute", 0, gemm, "GEMM"), Bar("links", gemm, wire, "reduce-scatter")]


def sliced(kind: Kind, slices: int = 4) -> list[Bar]:
    """A smaller collective per slice, pipelined with the GEMM: the first or last is exposed."""
    gemm, wire = RANKS / slices, (RANKS - 1) * TRANSFER / slices
    bars, compute, links = [], 0.0, 0.0
    for number in range(1, slices + 1):
        if kind == "gather":
            bars.append(Bar("links", links, wire, f"AG {number}"))
            links += wire
            compute = max(compute, links)
            bars.append(Bar("compute", compute, gemm, f"slice {number}"))
            compute += gemm
        else:
            bars.append(Bar("compute", compute, gemm, f"slice {number}"))
            compute += gemm
            links = max(links, compute)
            bars.append(Bar("links", links, wire, f"RS {number}"))
            links += wire
    return bars


def commfuse(kind: Kind, chunks: int = 3) -> list[Bar]:
    """The program of rank 0, its links as one line."""
    wire = (RANKS - 1) * TRANSFER / chunks
    bars, compute, links = [], 0.0, 0.0
    if kind == "gather":
        arrived = [wire * (number + 1) for number in range(chunks)]
        bars = [Bar("links", at - wire, wire, f"chunk {n}") for n, at in enumerate(arrived, 1)]
        bars.append(Bar("compute", 0, 1.0, "own r"))
        compute = 1.0
        for number, there in enumerate(arrived, 1):
            compute = max(compute, there)
            bars.append(Bar("compute", compute, (RANKS - 1) / chunks, f"chunk {number}"))
            compute += (RANKS - 1) / chunks
        return bars
    for number in range(1, chunks + 1):
        last = number == chunks
        gemm = (RANKS - last) / chunks
        bars.append(Bar("compute", compute, gemm, f"columns {number}"))
        compute += gemm
        links = max(links, compute)
        bars.append(Bar("links", links, wire, f"columns {number}"))
        links += wire
    bars.append(Bar("compute", compute, 1.0 / chunks, "own"))
    return bars


def chart(bars: Sequence[Bar], title: str) -> Chart:
    """The two lines, and a mark where the last bar ends."""
    rows = [
        bar._asdict() | {"end": bar.start + bar.length, "middle": bar.start + bar.length / 2}
        for bar in bars
    ]
    lines = ["compute", "links"]
    y = {"field": "line", "type": "nominal", "title": None, "sort": lines,
         "axis": {"ticks": False, "domain": False, "minExtent": 66},
         "scale": {"paddingInner": 0.15}}  # fmt: skip
    x = {"type": "quantitative", "axis": None, "scale": {"domain": [0, _LONGEST], "nice": False}}
    fill = {"field": "line", "type": "nominal", "legend": None,
            "scale": {"domain": lines, "range": [COLORS["blue"], COLORS["teal"]]}}  # fmt: skip
    rule = {"type": "rule", "strokeDash": [2, 3], "color": COLORS["faint"]}
    return {
        "title": title,
        "width": _WIDTH,
        "height": len(lines) * _LINE,
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "bar", "stroke": "#ffffff"},
             "encoding": {"x": x | {"field": "start"}, "x2": {"field": "end"}, "y": y,
                          "color": fill}},
            {"mark": {"type": "text", "color": "#ffffff", "fontSize": 10},
             "encoding": {"x": x | {"field": "middle"}, "y": y, "text": {"field": "label"}}},
            {"data": {"values": [{"end": max(row["end"] for row in rows)}]},
             "mark": rule, "encoding": {"x": x | {"field": "end"}}},
        ],
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "timeline.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out = parser.parse_args(argv).out
    kinds: tuple[tuple[Kind, str, str], ...] = (
        ("gather", "all-gather -> GEMM", "first"),
        ("reduce_scatter", "GEMM -> reduce-scatter", "last"),
    )
    charts = [
        *(chart(collective(kind), f"{name}: a collective, {RANKS} ranks")
          for kind, name, _ in kinds),
        *(chart(sliced(kind), f"sliced: the {end} slice's collective is exposed")
          for kind, _, end in kinds),
        *(chart(commfuse(kind), f"CommFuse: own block {end}, chunks of all peers")
          for kind, _, end in kinds),
    ]  # fmt: skip
    draw_charts(charts, "", out, columns=2)
    return 0
