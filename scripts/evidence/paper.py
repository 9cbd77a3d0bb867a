"""The paper's headlines on described machines: which configurations give figures of that size?

    python -m scripts.evidence paper [--models ...] [--sequence-lengths ...] [--markdown FILE]

CommFuse (arXiv 2604.24013) reports that more than 99.7 % of the communication overhead is removed
and that end-to-end latency falls by up to 36.9 %, on Ascend.  This simulates a Llama layer, forward
and backward, and its linear layers by themselves, on described NPUs, for the tensor-parallel sizes
of a node, and prints for each the best of this project's schedules against blocking collectives.
Every figure comes with its range over the uncertainty of the machine's description.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.step import Step, Training
from commfuse_npu.tools.simulate.sweep import CORNERS, Layout, Options, Range, of_hardware, training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant
from scripts.evidence.markdown_section import replace_section

__all__ = ["LATENCY", "OVERHEAD", "PARTS", "Case", "cases", "main", "report"]

OVERHEAD, LATENCY = 0.997, 0.369
"""What the paper reports: share of the overhead removed, share of the latency saved."""

_MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
_MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192, 16384, 32768, 65536, 131072)
_SIZES = (2, 4, 8, 16)
_PATTERNS = ("commfuse-*",)


PARTS: Mapping[str, Sequence[Callable[[Rank, LayerShape], None]]] = {
    "layer": (llama.forward, llama.backward),
    "layer, forward": (llama.forward,),
    "gather, fc1": (llama.mlp_in,),
    "fc2, scatter": (llama.mlp_out,),
    "proj, scatter": (llama.output_projection,),
}
"""What is timed; the linear layers forward."""


class Case(NamedTuple):
    """One part in one configuration; ``removed``, ``waiting`` and ``shorter`` are shares.

    Attributes:
        part: a key of :data:`PARTS`.
        ratio: communication / computation with blocking collectives.
        variant: the schedule with the shortest time at typical figures.
        removed: of the time that blocking collectives add, gone; splitting's cost counts.
        waiting: of the time that the compute engine stood still, gone; splitting's cost does not.
        shorter: of the time.
    """

    part: str
    machine: str
    tp: int
    model: str
    sequence: int
    ratio: Range
    variant: str
    removed: Range
    waiting: Range
    shorter: Range


def cases(
    machines: Sequence[str], models: Sequence[str], sequences: Sequence[int]
) -> Iterator[Case]:
    """Simulate all that fit."""
    for machine in machines:
        hardware = Hardware.load(find_config(machine, "hardware"))
        for tp in _SIZES:
            if tp > hardware.npus_per_node:
                continue
            for name in models:
                model = ModelConfig.load(find_config(name))
                for sequence in sequences:
                    options = Options(micro_batch=1, micro_batches=1, patterns=_PATTERNS)
                    try:
                        what = training(model, Layout(tp, 1, 1, 1), sequence, options)
                    except ConfigError:
                        break  # heads or groups are not divisible
                    offered = of_hardware(hardware, Layout(tp, 1, 1, 1), options)
                    chosen = [one for one in offered if one.schedule]
                    for part in PARTS:
                        yield _case(part, machine, name, hardware, what, chosen)


def _case(
    part: str,
    machine: str,
    model: str,
    hardware: Hardware,
    what: Training,
    chosen: Sequence[Variant],
) -> Case:
    typical = Step(hardware.machine(), what)
    best = min(chosen, key=lambda one: _played(part, typical, one)[0])
    found = []
    for compute, links in CORNERS:
        step = Step(hardware.machine(compute, links), what)
        (ideal, _), (plain, idle), (ours, waits) = (
            _played(part, step, one) for one in (COMPUTE_ONLY, REFERENCE, best)
        )
        found.append(
            (
                plain / ideal - 1,
                _share(plain - ours, plain - ideal),
                _share(idle - waits, idle),
                1 - ours / plain,
            )
        )
    ratio, removed, waiting, shorter = (Range.of(one) for one in zip(*found, strict=True))
    return Case(
        part, machine, what.tp, model, what.sequence, ratio, best.name, removed, waiting, shorter
    )


def _played(part: str, step: Step, variant: Variant) -> tuple[float, float]:
    """Seconds, and for how many of them the engine waits."""
    shape = step.training.shape
    played = [
        step.group.play(variant, lambda rank, build=build: build(rank, shape))  # type: ignore[misc]
        for build in PARTS[part]
    ]
    return sum(one.seconds for one in played), sum(one.waiting for one in played)


def _share(gone: float, of: float) -> float:
    return gone / of if of > 0 else math.nan


def report(found: Sequence[Case]) -> str:
    """Markdown: for each part which headline is reached where, and a row per group of ranks.

    A row shows the sequence length with the largest gain.
    """
    lines = ["Shares in %: typical (range)."]
    for part in PARTS:
        rows = [one for one in found if one.part == part]
        if rows:
            lines += ["", f"### {part}", "", *_headlines(rows), "", *_table(rows)]
    return "\n".join(lines)


def _table(found: Sequence[Case]) -> Iterator[str]:
    yield (
        "| machine | TP | model | at tokens | comm. / comp. | schedule | overhead removed | "
        "waiting removed | shorter |"
    )
    yield "|---|---:|---|---:|---|---|---|---|---|"
    for _, rows in groupby(found, key=lambda one: (one.machine, one.tp, one.model)):
        one = max(rows, key=lambda case: case.shorter.typical)
        yield (
            f"| {one.machine} | {one.tp} | {one.model} | {one.sequence} | "
            f"{_show(one.ratio, '{:.2f}')} | {one.variant} | {_show(one.removed)} | "
            f"{_show(one.waiting)} | {_show(one.shorter)} |"
        )


def _headlines(found: Sequence[Case]) -> Iterator[str]:
    yield f"Of {len(found)} configurations, at typical figures (at some end of the ranges):"
    yield ""
    for what, limit in (("removed", OVERHEAD), ("waiting", OVERHEAD), ("shorter", LATENCY)):
        name = {
            "removed": "of the overhead removed",
            "waiting": "of the waiting removed",
            "shorter": "shorter",
        }[what]
        typical = [one for one in found if getattr(one, what).typical >= limit]
        somewhere = [one for one in found if getattr(one, what).high >= limit]
        top = max(found, key=lambda one: getattr(one, what).typical)
        yield (
            f"- {limit:.1%} {name}: {len(typical)} ({len(somewhere)}); the most is "
            f"{_show(getattr(top, what))}, {top.machine}, TP {top.tp}, {top.model}, "
            f"{top.sequence} tokens."
        )


def _show(value: Range, form: str = "") -> str:
    def text(number: float) -> str:
        return form.format(number) if form else f"{number * 100:.1f}"

    return f"{text(value.typical)} ({text(value.low)} .. {text(value.high)})"


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", nargs="+", default=_MACHINES)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--sequence-lengths", nargs="+", type=int, default=_SEQUENCES)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the tables into their section of FILE"
    )
    given = parser.parse_args(argv)
    text = report(list(cases(given.machines, given.models, given.sequence_lengths)))
    print(text)
    if given.markdown:
        replace_section(given.markdown, "headlines", text)
    return 0
