"""Draw docs/flow.svg: one layer on one rank, simulated, in four forms on one axis of time.

Llama 3 8B, TP 8, 8,192 tokens, the server with Ascend 910B at typical figures: forward, then
backward, of a layer among many.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "commfuse", "font.size": 9})

from matplotlib import pyplot as plt  # noqa: E402  (the backend comes first)
from matplotlib.patches import Patch  # noqa: E402

from commfuse_npu.tools.config_file import find_config  # noqa: E402
from commfuse_npu.tools.model_config import ModelConfig  # noqa: E402
from commfuse_npu.tools.simulate.group import Played  # noqa: E402
from commfuse_npu.tools.simulate.hardware import Hardware  # noqa: E402
from commfuse_npu.tools.simulate.launches import ASIDE, COMPUTE  # noqa: E402
from commfuse_npu.tools.simulate.step import Step  # noqa: E402
from commfuse_npu.tools.simulate.sweep import (  # noqa: E402
    Layout,
    Options,
    best_lanes,
    training,
)
from commfuse_npu.tools.simulate.variants import (  # noqa: E402
    REFERENCE,
    Variant,
    direct,
    flowing,
    tuned,
)

__all__ = ["Lanes", "forms", "lanes", "main", "step"]

_HARDWARE, _MODEL, _TP, _TOKENS = "ascend_910b_server", "llama3_8b", 8, 8192
_GEMMS, _OTHER, _LINKS, _WAITING = "#4c72b0", "#a9bfdd", "#dd8452", "#d62728"
_PRODUCTS = ("qkv", "proj", "fc1", "fc2", "attention")

Run = tuple[float, float]
"""From when to when, in seconds."""


class Lanes(NamedTuple):
    """What one rank does, from 0 to ``seconds``.

    Attributes:
        gemms: GEMMs and attention.
        other: norms, copies and the like on the same stream.
        links: while anything is under way.
        waiting: while the stream stands still.
    """

    seconds: float
    gemms: tuple[Run, ...]
    other: tuple[Run, ...]
    links: tuple[Run, ...]
    waiting: tuple[Run, ...]


def step() -> Step:
    """What is drawn."""
    hardware = Hardware.load(find_config(_HARDWARE, "hardware"))
    one = Options(micro_batch=1, micro_batches=1)
    what = training(ModelConfig.load(find_config(_MODEL)), Layout(_TP, 1, 1, 1), _TOKENS, one)
    return Step(hardware.machine(), what)


def forms() -> dict[str, Variant]:
    """By title."""
    hardware = Hardware.load(find_config(_HARDWARE, "hardware"))
    ours = tuned(direct(_TP, _TP), best_lanes(hardware, _TP), (1, 2, 3, 4, 6))
    return {
        "plain collectives": REFERENCE,
        "Megatron's order": Variant("megatron", "megatron"),
        "CommFuse, operator by operator (tuned)": ours,
        "CommFuse, flow of 4 chunks": flowing(4),
    }


def lanes(at: Step, variant: Variant) -> tuple[Lanes, Lanes]:
    """Forward and backward of a layer; of a flow of the second of three."""
    return _lanes(at.layer(variant, "forward")), _lanes(at.layer(variant, "backward"))


def _lanes(played: Played) -> Lanes:
    gemms: list[Run] = []
    other: list[Run] = []
    links: list[Run] = []
    for span in played.timeline.spans:
        run, one = (span.start, span.end), span.operation
        if span.rank != played.shown or one.engine == ASIDE or span.start >= span.end:
            continue
        product = any(word in one.name for word in _PRODUCTS) or "gemm" in one.name
        lane = gemms if product else other
        (lane if one.engine == COMPUTE else links).append(run)
    busy = list(_joined([*gemms, *other]))
    ends = [(0.0, 0.0), *busy, (played.seconds,) * 2]
    waiting = ((a, b) for (_, a), (b, _) in pairwise(ends) if b > a)
    joined = (tuple(_joined(runs)) for runs in (gemms, other, links, waiting))
    return Lanes(played.seconds, *joined)


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """In order, those that touch as one."""
    open_: Run | None = None
    for start, stop in sorted(runs):
        if open_ is None or start > open_[1] + 1e-9:
            if open_ is not None:
                yield open_
            open_ = start, stop
        else:
            open_ = open_[0], max(open_[1], stop)
    if open_ is not None:
        yield open_


def draw(axes: Any, title: str, parts: Sequence[Lanes], widest: float) -> None:
    """One form: compute above, links below, times in ms."""
    offset = 0.0
    for one in parts:
        for runs, height, color in (
            (one.gemms, 1, _GEMMS),
            (one.other, 1, _OTHER),
            (one.waiting, 1, _WAITING),
            (one.links, 0, _LINKS),
        ):
            bars = [(1e3 * (offset + a), 1e3 * (b - a)) for a, b in runs]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=color, linewidth=0)
        offset += one.seconds
        axes.axvline(1e3 * offset, color="#555555", linewidth=0.8, linestyle=":")
    waits = sum(b - a for one in parts for a, b in one.waiting)
    axes.set(xlim=(0, 1e3 * widest * 1.01), ylim=(-0.5, 1.5))
    axes.set_yticks([0, 1], ["links", "compute"])
    said = f"{title}: {1e3 * offset:.2f} ms, of which {1e3 * waits:.2f} ms waiting"
    axes.set_title(said, loc="left", size=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(argv: Sequence[str]) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[2] / "docs" / "flow.svg"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out = parser.parse_args(argv).out
    at = step()
    found = {title: lanes(at, variant) for title, variant in forms().items()}
    widest = max(sum(one.seconds for one in parts) for parts in found.values())
    figure, grid = plt.subplots(len(found), 1, figsize=(11, 5.2), layout="constrained", sharex=True)
    for axes, (title, parts) in zip(grid, found.items(), strict=True):
        draw(axes, title, parts, widest)
    grid[-1].set_xlabel("ms; dotted: where the forward ends, and the backward")
    colors = {
        "GEMMs, attention": _GEMMS, "norms and the like": _OTHER, "waiting": _WAITING,
        "transfers under way": _LINKS,
    }  # fmt: skip
    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
    return 0
