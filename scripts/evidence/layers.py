"""A Llama layer in every form, over machines, models, groups and lengths: who is ahead where?

    python -m scripts.evidence.layers [--markdown FILE | --results FILE...]

Simulates forward and backward of one layer, each form at its best, as docs/layers_tables.md says.
Cells are how much less time it takes than in Megatron's order.  The last is a layer without
communication.
Who is ahead is counted a second time with deterministic sums of HCCL, as ours are.  The table of
docs/simulate.md has some of these cells.

A last table counts for the layers of whole steps, whose first forward and last backward have no
partner, with hosts that take 15, 55 and 118 us for a launch.
"""

import argparse
import math
import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.timed import CORNERS, Range
from commfuse_npu.tools.simulate.training import Layout, Training, training
from commfuse_npu.tools.simulate.variants import (
    COC,
    COC_FUSED,
    COMPUTE_ONLY,
    FUSED,
    MC2,
    MEGATRON,
    OVERLAP,
    Variant,
    forms,
)
from commfuse_npu.tools.terminal import table_head, table_row

_MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
_MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192, 16384, 32768)
_SIZES = (2, 4, 8)

_SLICES = "CoC in slices"
_OURS = (f"{FUSED}, tuned", FUSED, OVERLAP.name)
_RIVALS = (_SLICES, COC_FUSED.name, MC2.name, MEGATRON.name)
_STEP_FORMS = (FUSED, *_RIVALS)
RESULTS = (
    ("Llama 2 7B", "TP 2", "A2 server"),
    ("Llama 3 8B", "TP 4", "A2 server"),
    ("Llama 3 8B", "TP 8", "A2 server"),
    ("Llama 3 8B", "TP 4", "A3 supernode"),
    ("Llama 3 8B", "TP 8", "A3 supernode"),
)
"""Layouts of the short table, with 8,192 tokens."""
RESULT_FORMS = (OVERLAP.name, FUSED, _SLICES, COC_FUSED.name, MC2.name)
_HOSTS = (15, 55, 118)
"""Microseconds of host time per launch."""
_MICRO_BATCHES = (1, 8, 32)

Shares = dict[str, float]
"""Share of the time in Megatron's order, by form; of whole steps, seconds by form."""
Point = dict[str, list[Shares]]
"""By row of the last table, with ``layer`` and ``ordered``: shares at every corner of the machine's
description, typical figures first; ``ordered`` are typical, with HCCL's sums in a fixed order."""


def layer(model: str, tp: int, sequence: int) -> Training:
    """A training with one sequence and no pipeline."""
    described = ModelConfig.load(find_config(model))
    sizes = Layout(tp, 1, 1, 1)
    return training(described, sizes, sequence, micro_batch=1, micro_batches=1)


def _times(
    hardware: Hardware,
    setup: Training,
    seconds: Callable[[TrainingStep, Variant], float],
    corners: int = len(CORNERS),
    *,
    tuned: bool = False,
) -> list[dict[str, float]]:
    """Seconds by form at so many corners of a description; of CoC's slices the fastest."""
    variants = [form for form in forms(hardware.machine(), setup) if tuned or not form.tuned]
    result = []
    for corner in CORNERS[:corners]:
        step = TrainingStep(hardware.machine(*corner), setup)
        times = {form.name: seconds(step, form) for form in variants}
        times[_SLICES] = min(times.pop(form.name) for form in COC)
        result.append(times)
    return result


def _in_the_middle(step: TrainingStep, form: Variant) -> float:
    """Seconds of the layers of a forward and a backward; a launch keeps the faster order."""
    seconds = step.chunk(form, 0).repeated
    return seconds if form.alone is None else min(seconds, _in_the_middle(step, form.alone))


def shares(
    hardware: Hardware, setup: Training, corners: int = len(CORNERS), *, tuned: bool = True
) -> list[Shares]:
    """Simulate layers at so many corners of a description; tuned forms take most of the time."""
    times = _times(hardware, setup, _in_the_middle, corners, tuned=tuned)
    return [{name: seconds / at[MEGATRON.name] for name, seconds in at.items()} for at in times]


def point(machine: str, model: str, tp: int, sequence: int, hosts: Sequence[int]) -> Point:
    """Simulate a layer, and the layers of whole steps.

    Args:
        hosts: microseconds of host time per launch, of the steps.
    """
    hardware = Hardware.find(machine)
    setup = layer(model, tp, sequence)
    ordered = shares(replace(hardware, deterministic=True), setup, 1)
    result: Point = {"layer": shares(hardware, setup), "ordered": ordered}
    for host, recomputes, count in product(hosts, (False, True), _MICRO_BATCHES):
        batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
        title = f"{host} us, {batches}{', recomputed' if recomputes else ''}"
        step = training(setup.model, setup.layout, micro_batches=count, recomputes=recomputes)
        slower = hardware.launching(host * 1e-6)
        result[title] = _times(slower, step, TrainingStep.layers)
    return result


def saved(layout: Sequence[str]) -> dict[str, Range]:
    """How much less time a layer takes than in Megatron's order, by form.

    Args:
        layout: one of :data:`RESULTS`.
    """
    name, size, machine = layout
    model = name.lower().replace("llama ", "llama").replace(" ", "_")
    hardware = Hardware.find(_MACHINES["A3" in machine])
    setup = layer(model, int(size.removeprefix("TP ")), 8192)
    corners = shares(hardware, setup, tuned=False)
    there = (form for form in RESULT_FORMS if form in corners[0])
    return {form: Range.of([1 - corner[form] for corner in corners]) for form in there}


# ------------------------------------------------------------------------ Markdown


def results() -> str:
    """The short table: what a layer saves in each form."""
    lines = [table_head(("% less time than Megatron's order", *RESULT_FORMS))]
    for layout in RESULTS:
        found = saved(layout)
        fastest = max(found.values(), key=lambda less: less.typical)
        cells = [", ".join(layout)]
        for form in RESULT_FORMS:
            less = found.get(form)
            text = "-" if less is None else less.percent.replace(" %", "")
            cells.append(f"**{text}**" if less is fastest else text)
        lines.append(table_row(cells))
    return "\n".join(lines)


def _wins(points: Sequence[Sequence[Shares]], form: str, *rivals: str) -> tuple[int, int]:
    """How often a form is faster than all rivals that exist: typically, and at every corner."""
    there = [corners for corners in points if len(rivals) > 1 or rivals[0] in corners[0]]
    ahead = [
        [all(times[form] < times.get(rival, math.inf) for rival in rivals) for times in corners]
        for corners in there
    ]
    return sum(row[0] for row in ahead), sum(map(all, ahead))


def _head(first: str, names: Sequence[str], points: Sequence[Sequence[Shares]]) -> str:
    kernels = sum(COC_FUSED.name in corners[0] for corners in points)
    titles = (f"{name} (of {kernels})" if name == COC_FUSED.name else name for name in names)
    return table_head([f"{first}, of {len(points)} points", *titles], False)


def report(points: Mapping[tuple[object, ...], Point]) -> str:
    """The points at which CommFuse is ahead, a row per point, and whole steps."""
    titles = next(iter(points.values()))
    by_row = {row: [point[row] for point in points.values()] for row in titles}
    times = by_row.pop("layer")
    ordered = by_row.pop("ordered")
    groups = [*((rival,) for rival in _RIVALS), _RIVALS]
    names = [*_OURS, *_RIVALS[:-1], COMPUTE_ONLY.name]
    lines = [_head("ahead", [*_RIVALS, "all of them"], times)]
    for form in _OURS:
        counts = (
            (*_wins(times, form, *group), _wins(ordered, form, *group)[0]) for group in groups
        )
        lines.append(table_row([f"*{form}*", *("; ".join(map(str, count)) for count in counts)]))
    lines += [
        "",
        "At typical figures; at every end of the ranges; with deterministic sums of HCCL.",
    ]
    lines += ["", table_head(("machine", "model", "TP", "tokens", *names))]
    for case, corners in zip(points, times, strict=True):
        lines.append(table_row([*map(str, case), *(_cell(corners, name) for name in names)]))
    lines += ["", _head("*overlap* ahead", _STEP_FORMS, times)]
    for row, seconds in by_row.items():
        wins = (_wins(seconds, OVERLAP.name, form) for form in _STEP_FORMS)
        lines.append(table_row([row, *(f"{usual}; {always}" for usual, always in wins)]))
    return "\n".join(lines)


def _cell(corners: Sequence[Shares], name: str) -> str:
    typical = corners[0]
    if name not in typical:
        return "-"
    fastest = min(typical.get(form, 1.0) for form in (*_OURS, *_RIVALS))
    text = Range.of([1 - corner[name] for corner in corners]).percent
    return f"**{text}**" if typical[name] == fastest else text


def publish(text: str, name: str, page: Path | None) -> None:
    """Print a table, and put it into a page between the comments of its name."""
    print(text)
    if page is None:
        return
    begin = f"<!-- begin: {name} -->"
    end = f"<!-- end: {name} -->"
    section = re.compile(f"{begin}.*?{end}", re.S)
    page_text, sections = section.subn(
        lambda _: f"{begin}\n\n{text.strip()}\n\n{end}", page.read_text("utf-8")
    )
    if sections != 1:
        raise ValueError(f"{page} has to have {begin!r} and {end!r} once each, in this order")
    page.write_text(page_text, "utf-8")


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table into its section of FILE"
    )
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE", help="only the short table, into these"
    )
    options = parser.parse_args(argv)
    if options.results:
        text = results()
        for page in options.results:
            publish(text, "results", page)
        return 0
    cases = [*product(_MACHINES, _MODELS, _SIZES, _SEQUENCES)]
    # Forked processes could inherit a lock that another thread holds.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        points = pool.map(partial(point, hosts=_HOSTS), *zip(*cases, strict=True))
        text = report(dict(zip(cases, points, strict=True)))
    publish(text, "layers", options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
