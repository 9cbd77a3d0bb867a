"""A Llama layer in every form, over machines, models, groups and lengths: who is ahead where?

    python -m scripts.evidence.layers [--models ...] [--sequence-lengths ...] [--markdown FILE]

The table of docs/simulate.md is one minus the shares of ``--models llama2_7b llama3_8b
--sequence-lengths 8192``.

Simulates forward and backward of one layer, each form at its best, as docs/layers_tables.md says.
Times are shares of those with blocking collectives.  The last is a layer without communication.
Who is ahead is counted a second time with deterministic sums of HCCL, as ours are.

A last table counts for whole steps of forward-backward, whose first forward and last backward have
no partner, with hosts that take 15, 55 and 118 us for a launch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import Machine
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.step import LayerTime, Layout, Recompute, Step, Training
from commfuse_npu.tools.simulate.timed import CORNERS
from commfuse_npu.tools.simulate.training import training
from commfuse_npu.tools.simulate.variants import COC, REFERENCE, Variant
from commfuse_npu.tools.simulate.variants import forms as simulated
from commfuse_npu.tools.terminal import table_head, table_row

__all__ = ["BOUND", "OURS", "RIVALS", "Point", "forms", "layer", "main", "point", "publish",
           "report", "steps", "steps_report"]  # fmt: skip

_MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
_MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192, 16384, 32768)
_SIZES = (2, 4, 8)

OURS = ("ours", "ours, other rounding", "default", "forward-backward")
_KERNEL = "CoC fused"
RIVALS = ("CoC", _KERNEL, "MC2", "Megatron")
BOUND = "compute"
_STEP_FORMS = ("default", *RIVALS)
_NAMES = {
    "commfuse-tuned": "ours",
    "commfuse-rounded": "ours, other rounding",
    "commfuse": "default",
    "commfuse-fb": "forward-backward",
    "coc-fused": _KERNEL,
    "mc2": "MC2",
    "megatron": "Megatron",
    **{form.name: f"CoC {form.way}" for form in COC},
}
"""Columns of the table, by the name of a form."""
_HOSTS = (15, 55, 118)
"""Microseconds of host time per launch."""
_MICRO_BATCHES = (8, 32)

Shares = dict[str, float]
"""Share of the time with blocking collectives, by form."""


class Point(NamedTuple):
    """Times of a layer by form, as shares of the layer with blocking collectives.

    ``shares`` has one entry per corner of the machine's description, typical figures first;
    ``ordered`` is at typical figures, with HCCL's sums in a fixed order.
    """

    machine: str
    model: str
    tp: int
    sequence: int
    shares: tuple[Shares, ...]
    ordered: Shares


def forms(machine: Machine, setup: Training) -> dict[str, Variant]:
    """The compared forms, by column; blocking collectives are none."""
    return {
        _NAMES.get(form.name, form.name): form
        for form in simulated(machine, setup)
        if form != REFERENCE
    }


def _times(
    hardware: Hardware, corner: int, setup: Training, left_out: Sequence[str] = ()
) -> dict[str, LayerTime]:
    """Times by form; ``""`` is with blocking collectives; ``CoC`` is its fastest slices."""
    variants = forms(hardware.machine(), setup)
    step = Step(hardware.machine(*CORNERS[corner]), setup)
    times = {name: step.layer_time(form) for name, form in variants.items() if name not in left_out}

    def seconds(time: LayerTime) -> float:
        return time.seconds + (time.forward if setup.recomputes else 0.0)

    slices = [times.pop(f"CoC {variant.way}") for variant in COC]
    return {"": step.layer_time(REFERENCE), **times, "CoC": min(slices, key=seconds)}


def layer(model: str, tp: int, sequence: int, recompute: Recompute = "none") -> Training:
    """A training of one layer with one sequence."""
    described, sizes = ModelConfig.load(find_config(model)), Layout(tp, 1, 1, 1)
    return training(described, sizes, sequence, micro_batch=1, micro_batches=1, recompute=recompute)


def point(machine: str, model: str, tp: int, sequence: int, corners: int = len(CORNERS)) -> Point:
    """Simulate a layer with one sequence, at so many corners of the machine's description."""
    hardware = Hardware.load(find_config(machine, "hardware"))
    setup = layer(model, tp, sequence)
    times = [_times(hardware, corner, setup) for corner in range(corners)]
    times.append(_times(replace(hardware, deterministic=True), 0, setup))

    def shares(times: dict[str, LayerTime]) -> Shares:
        return {name: time.seconds / times[""].seconds for name, time in times.items() if name}

    *by_corner, ordered = map(shares, times)
    return Point(machine, model, tp, sequence, tuple(by_corner), ordered)


_Steps = dict[tuple[int, Recompute, int], list[Shares]]
"""Seconds per layer and micro-batch by form, at every corner; by host, recomputation and
micro-batches."""


def steps(machine: str, model: str, tp: int, sequence: int) -> _Steps:
    """Simulate steps without a pipeline, for untuned forms that can be launched."""
    described = Hardware.load(find_config(machine, "hardware"))
    seconds: _Steps = {}
    for corner, host, recompute in product(range(len(CORNERS)), _HOSTS, get_args(Recompute)):
        setup = layer(model, tp, sequence, recompute)
        times = _times(described.launching(host * 1e-6), corner, setup, (BOUND, *OURS[:2]))
        del times[""]
        for count in _MICRO_BATCHES:
            lengths = {name: _length(time, count, setup.recomputes) for name, time in times.items()}
            seconds.setdefault((host, recompute, count), []).append(lengths)
    return seconds


def _length(time: LayerTime, micro_batches: int, recomputes: bool) -> float:
    alone = time.alone + (time.forward if recomputes else 0.0)
    paired = alone if time.pair is None else time.pair[0]
    return alone + (paired - alone) * (micro_batches - 1) / micro_batches


# ------------------------------------------------------------------------ Markdown


def _wins(points: Sequence[Sequence[Shares]], form: str, *rivals: str) -> tuple[int, int]:
    """How often a form is faster than all rivals that exist: typically, and at every corner."""
    there = [corners for corners in points if len(rivals) > 1 or rivals[0] in corners[0]]
    ahead = [
        [all(times[form] < times.get(rival, math.inf) for rival in rivals) for times in corners]
        for corners in there
    ]
    return sum(row[0] for row in ahead), sum(map(all, ahead))


def _head(first: str, names: Sequence[str], points: Sequence[Sequence[Shares]]) -> str:
    kernels = sum(_KERNEL in corners[0] for corners in points)
    titles = (f"{name} (of {kernels})" if name == _KERNEL else name for name in names)
    return table_head([f"{first}, of {len(points)} points", *titles], False)


def steps_report(points: Sequence[_Steps]) -> str:
    """The number of points at which steps of forward-backward are shorter."""
    keys = list(points[0])
    lines = [_head("*forward-backward* ahead", _STEP_FORMS, [point[keys[0]] for point in points])]
    for host, recompute, count in keys:
        times = [point[host, recompute, count] for point in points]
        wins = (_wins(times, "forward-backward", form) for form in _STEP_FORMS)
        title = f"{host} us, {count} micro-batches{', recomputed' * (recompute == 'full')}"
        lines.append(table_row([title, *(f"{usual}; {always}" for usual, always in wins)]))
    return "\n".join(lines)


def report(points: Sequence[Point]) -> str:
    """The points at which CommFuse is ahead, and a row per point."""
    times, ordered = [point.shares for point in points], [[point.ordered] for point in points]
    groups, names = [*((rival,) for rival in RIVALS), RIVALS], [*OURS, *RIVALS, BOUND]
    lines = [_head("ahead", [*RIVALS, "all of them"], times)]
    for form in OURS:
        counts = (
            (*_wins(times, form, *group), _wins(ordered, form, *group)[0]) for group in groups
        )
        lines.append(table_row([f"*{form}*", *("; ".join(map(str, count)) for count in counts)]))
    lines += [
        "",
        "At typical figures; at every end of the ranges; with deterministic sums of HCCL.",
    ]
    lines += ["", table_head(("machine", "model", "TP", "tokens", *names))]
    for point in points:
        fastest = min(point.shares[0].get(name, 1.0) for name in (*OURS, *RIVALS))
        cells = (_cell(point, name, fastest) for name in names)
        place = point.machine, point.model, str(point.tp), str(point.sequence)
        lines.append(table_row([*place, *cells]))
    return "\n".join(lines)


def _cell(point: Point, name: str, fastest: float) -> str:
    shares = [corner[name] for corner in point.shares if name in corner]
    if not shares:
        return "-"
    text = f"{shares[0]:.3f}"
    if shares[0] == fastest:
        text = f"**{text}**"
    return f"{text} ({min(shares):.2f} .. {max(shares):.2f})" if len(shares) > 1 else text


def publish(text: str, name: str, page: Path | None) -> None:
    """Print a table, and put it into a page between the comments of its name."""
    print(text)
    if page is None:
        return
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, *behind = page.read_text("utf-8").split(begin)
    _, *after = "".join(behind).split(end)
    if len(behind) != 1 or len(after) != 1:
        raise ValueError(
            f"{page} has to have {begin!r} and {end!r} once each, in this order; add them where "
            "the section belongs"
        )
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after[0]}", "utf-8")


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--sequence-lengths", nargs="+", type=int, default=_SEQUENCES)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table into its section of FILE"
    )
    options = parser.parse_args(argv)
    cases = [*product(_MACHINES, options.models, _SIZES, options.sequence_lengths)]
    with ProcessPoolExecutor() as pool:
        hosts = [pool.submit(steps, *case) for case in cases]
        layers = [pool.submit(point, *case) for case in cases]
        text = report([future.result() for future in layers])
        text += "\n\n" + steps_report([future.result() for future in hosts])
    publish(text, "layers", options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
