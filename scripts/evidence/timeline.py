"""Draw docs/timeline.svg: one linear layer with its collective, sliced, and taken apart.

A drawing of the orders, not a measurement: every block of GEMM takes 1, every transfer 0.9 of it.
What CommFuse does in which order is written in commfuse_npu/plan/rules/linear.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "commfuse", "font.size": 9})

from matplotlib import pyplot as plt  # noqa: E402  (the backend comes first)

RANKS = 4
TRANSFER = 0.9
COMPUTE, LINKS = "#4c72b0", "#dd8452"


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


def draw(axes: Any, bars: Iterable[Bar], title: str) -> None:
    bars = list(bars)
    for bar in bars:
        height, color = (1, COMPUTE) if bar.line == "compute" else (0, LINKS)
        axes.barh(height, bar.length, left=bar.start, height=0.8, color=color, edgecolor="white")
        middle = bar.start + bar.length / 2
        axes.text(middle, height, bar.label, ha="center", va="center", color="white", size=7.5)
    end = max(bar.start + bar.length for bar in bars)
    axes.axvline(end, color="#555555", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 7.2), ylim=(-0.5, 1.5), xticks=[])
    axes.set_yticks([0, 1], ["links", "compute"])
    axes.set_title(title, loc="left", size=9)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def main(argv: Sequence[str]) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "timeline.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out = parser.parse_args(argv).out
    figure, grid = plt.subplots(3, 2, figsize=(11, 4.6), layout="constrained")
    kinds: tuple[tuple[Kind, str], ...] = (
        ("gather", "all-gather -> GEMM"),
        ("reduce_scatter", "GEMM -> reduce-scatter"),
    )
    for column, (kind, name) in enumerate(kinds):
        draw(grid[0][column], collective(kind), f"{name}: a collective, {RANKS} ranks")
        end = "first" if kind == "gather" else "last"
        draw(grid[1][column], sliced(kind), f"sliced: the {end} slice's collective is exposed")
        draw(grid[2][column], commfuse(kind), f"CommFuse: own block {end}, chunks of all peers")
    figure.savefig(out, metadata={"Date": None})
    return 0
