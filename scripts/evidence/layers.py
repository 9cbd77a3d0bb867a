"""A Llama layer in every form, over machines, models, groups and lengths: who is ahead where?

    python -m scripts.evidence layers [--models ...] [--sequence-lengths ...] [--markdown FILE]

README's table is one minus the shares of ``--models llama2_7b llama3_8b --sequence-lengths 8192``.

Simulates forward and backward of one layer, each form at its best: ours with the fastest number of
chunks for each operation, or Megatron's order where that is faster, CoC with the fastest number of
slices (2, 4, 8) for all, with 8 ranks also as kernels, MC2 as its host cuts.  With other rounding
sums are made in one pass, and weight gradients of row-parallel layers by blocks.  Forward-backward
is a layer of a forward beside one of a backward, in the middle of a step.  Times are shares of
those with blocking collectives.  Nobody can launch the last four: CoC tuned for each operation as
ours is, the kernels of hicann/catccos, kernels without a cost of cutting, and no communication at
all.  Who is ahead is counted a second time with HCCL's sums in an order, as ours are.

A last table counts for whole steps of forward-backward, whose first forward and last backward have
no partner, with hosts that take 15, 55 and 99 us for a launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import Machine, covering_outputs
from commfuse_npu.plan import least_rows, usual_chunks
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.step import LayerTime, Recompute, Shared, Step, Training
from commfuse_npu.tools.simulate.sweep import CORNERS, Layout, Options, best_lanes, training
from commfuse_npu.tools.simulate.variants import (
    CATCCOS,
    COC_FUSED,
    COMPUTE_ONLY,
    IDEAL,
    MC2,
    REFERENCE,
    TURNS,
    Variant,
    direct,
    fused,
    sliced,
    tuned,
)
from scripts.evidence.markdown_section import replace_section

__all__ = ["BOUNDS", "OURS", "RIVALS", "Point", "main", "point", "report"]

_MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
_MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192, 16384, 32768)
_SIZES = (2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 6)
_SLICES = (2, 4, 8)

OURS = ("ours", "ours, other rounding", "default", "forward-backward")
_KERNEL = "CoC fused"
RIVALS = ("CoC", _KERNEL, "MC2", "Megatron")
BOUNDS = ("CoC tuned", "catccos", "ideal", "compute")
_STEP_FORMS = ("default", *RIVALS)
_HOSTS = (15, 55, 99)
"""Microseconds per launch."""
_MICRO_BATCHES = (8, 32)
_RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
_GONE = ("Megatron", "CoC", "MC2", _KERNEL, "default", "ours", "forward-backward")
_KERNELS = ("MC2", _KERNEL)
"""What waits inside of them is not seen."""


class Point(NamedTuple):
    """Times of a layer by form, as shares of the layer with blocking collectives.

    ``shares`` has one entry per corner of the machine's description, typical figures first;
    ``ordered`` is with HCCL's sums in an order, at typical figures; ``waiting`` has the shares of
    the waiting with blocking collectives that are left, at typical figures.
    """

    machine: str
    model: str
    tp: int
    sequence: int
    shares: tuple[dict[str, float], ...]
    ordered: dict[str, float]
    waiting: dict[str, float]

    def added_gone(self, form: str) -> float:
        """Share of what blocking collectives add to a layer that is gone, at typical figures."""
        shares = self.shares[0]
        return (1 - shares[form]) / (1 - shares["compute"])

    def ahead(self, form: str, others: Sequence[str]) -> bool:
        """Whether a form is faster than all the others, at typical figures."""
        return _ahead(self.shares[0], form, others)

    def ahead_everywhere(self, form: str, others: Sequence[str]) -> bool:
        """Whether it is at every end of the ranges."""
        return all(_ahead(shares, form, others) for shares in self.shares)

    def ahead_ordered(self, form: str, others: Sequence[str]) -> bool:
        """Whether it is with HCCL's sums in an order."""
        return _ahead(self.ordered, form, others)


def _ahead(shares: dict[str, float], form: str, others: Sequence[str]) -> bool:
    return all(shares[form] < shares[other] for other in others if other in shares)


def forms(machine: Machine, lanes: int, what: Training) -> dict[str, Variant]:
    """By name."""
    tp, rows, hidden = what.tp, what.shape.block, what.hidden
    base, least = direct(tp, tp), covering_outputs(machine, tp)
    megatron = Variant("megatron", "megatron")
    default = fused(base, lanes, usual_chunks(tp, rows, hidden), collectives_from=least)
    return {
        "ours": tuned(base, lanes, _CHUNKS),
        "ours, other rounding": tuned(base, lanes, _CHUNKS, wgrad="blocks", sums="once"),
        "default": default if rows >= least_rows(tp, hidden) else megatron,
        **{f"CoC {k}": Variant(f"coc-{k}", "sliced", slices=k) for k in _SLICES},
        "forward-backward": TURNS,
        **({_KERNEL: COC_FUSED, "catccos": CATCCOS} if tp == 8 else {}),
        "Megatron": megatron,
        "MC2": MC2,
        "CoC tuned": sliced(),
        "ideal": IDEAL,
        "compute": COMPUTE_ONLY,
    }


def point(machine: str, model: str, tp: int, sequence: int, corners: int = len(CORNERS)) -> Point:
    """Simulate a layer of one sequence.

    Args:
        corners: how many of the corners of the machine's description.
    """
    hardware = Hardware.load(find_config(machine, "hardware"))
    options = Options(micro_batch=1, micro_batches=1)
    what = training(ModelConfig.load(find_config(model)), Layout(tp, 1, 1, 1), sequence, options)
    every = forms(hardware.machine(), best_lanes(hardware, tp), what)
    times = [
        _times(Step(hardware.machine(compute, links), what), every)
        for compute, links in CORNERS[:corners]
    ]
    ordered = _times(Step(replace(hardware, deterministic=True).machine(), what), every)
    plain, typical = times[0]
    waiting = {name: one.waiting / plain.waiting for name, one in typical.items()}
    shares = tuple(map(_shares, times))
    return Point(machine, model, tp, sequence, shares, _shares(ordered), waiting)


_Times = tuple[LayerTime, dict[str, LayerTime]]
"""With blocking collectives, and by form."""


def _times(step: Step, every: dict[str, Variant]) -> _Times:
    found = {name: step.layer_time(one) for name, one in every.items()}
    again = step.training.recompute == "full"
    slices = [found.pop(f"CoC {k}") for k in _SLICES]
    found["CoC"] = min(slices, key=partial(_seconds, again=again))
    return step.layer_time(REFERENCE), found


def _seconds(time: LayerTime, *, again: bool) -> float:
    return time.seconds + (time.forward if again else 0.0)


def _shares(times: _Times) -> dict[str, float]:
    plain, found = times
    return {name: one.seconds / plain.seconds for name, one in found.items()}


_Steps = dict[tuple[int, Recompute, int], list[dict[str, float]]]
"""Seconds per layer and micro-batch by form, at every corner; by host, recomputation and
micro-batches."""


def steps(machine: str, model: str, tp: int, sequence: int) -> _Steps:
    """Simulate steps without a pipeline, of forms that can be launched and are not tuned."""
    described = Hardware.load(find_config(machine, "hardware"))
    config = ModelConfig.load(find_config(model))
    found: _Steps = {}
    for corner in CORNERS:
        shared: Shared = {}
        for host, recompute in product(_HOSTS, _RECOMPUTES):
            hardware = described.launching(host * 1e-6)
            options = Options(micro_batch=1, micro_batches=1, recompute=recompute)
            what = training(config, Layout(tp, 1, 1, 1), sequence, options)
            every = forms(hardware.machine(), best_lanes(hardware, tp), what)
            known = {name: of for name, of in every.items() if name not in (*BOUNDS, *OURS[:2])}
            _, times = _times(Step(hardware.machine(*corner), what, shared=shared), known)
            for count in _MICRO_BATCHES:
                lengths = {name: _length(of, count, recompute) for name, of in times.items()}
                found.setdefault((host, recompute, count), []).append(lengths)
    return found


def _length(time: LayerTime, micro_batches: int, recompute: Recompute) -> float:
    alone = time.alone + (time.forward if recompute == "full" else 0.0)
    paired = alone if time.pair is None else time.pair[0]
    return alone + (paired - alone) * (micro_batches - 1) / micro_batches


def _steps(given: tuple[str, str, int, int]) -> _Steps:
    return steps(*given)


def steps_report(points: Sequence[_Steps]) -> str:
    """Markdown: at how many points steps of forward-backward are shorter."""
    kernels = sum(_KERNEL in next(iter(one.values()))[0] for one in points)
    titles = (f"{name} (of {kernels})" if name == _KERNEL else name for name in _STEP_FORMS)
    lines = [
        f"| *forward-backward* ahead, of {len(points)} points | {' | '.join(titles)} |",
        f"|---|{'---|' * len(_STEP_FORMS)}",
    ]
    for key in points[0]:
        host, recompute, count = key
        counts = []
        for form in _STEP_FORMS:
            corners = [one[key] for one in points if form in one[key][0]]
            ahead = [[_ahead(of, "forward-backward", (form,)) for of in one] for one in corners]
            counts.append(f"{sum(one[0] for one in ahead)}; {sum(map(all, ahead))}")
        said = f"{host} us, {count} micro-batches{', recomputed' * (recompute == 'full')}"
        lines.append(f"| {said} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _point(given: tuple[str, str, int, int]) -> Point:
    return point(*given)


def report(points: Sequence[Point]) -> str:
    """Markdown: where we are ahead, and a row per point."""
    names = [*OURS, *RIVALS, *BOUNDS]
    lines = [
        *_verdicts(points),
        "",
        *_gone(points),
        "",
        f"| machine | model | TP | tokens | {' | '.join(names)} |",
        f"|---|---|---:|---:|{'---:|' * len(names)}",
    ]
    for one in points:
        fastest = min(one.shares[0].get(name, 1.0) for name in (*OURS, *RIVALS))
        cells = (_cell(one, name, fastest) for name in names)
        lines.append(
            f"| {one.machine} | {one.model} | {one.tp} | {one.sequence} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _cell(one: Point, name: str, fastest: float) -> str:
    shares = [of[name] for of in one.shares if name in of]
    if not shares:
        return "-"
    text = f"{shares[0]:.3f}"
    if shares[0] == fastest:
        text = f"**{text}**"
    return f"{text} ({min(shares):.2f} .. {max(shares):.2f})" if len(shares) > 1 else text


def _verdicts(points: Sequence[Point]) -> Iterator[str]:
    kernels = sum(_KERNEL in one.shares[0] for one in points)
    titles = (f"{name} (of {kernels})" if name == _KERNEL else name for name in RIVALS)
    yield f"| ahead, of {len(points)} points | {' | '.join(titles)} | all of them |"
    yield f"|---|{'---|' * (len(RIVALS) + 1)}"
    for form in OURS:
        counts = [_counts(points, form, others) for others in (*((one,) for one in RIVALS), RIVALS)]
        yield f"| *{form}* | {' | '.join(counts)} |"
    yield ""
    yield "At typical figures; at every end of the ranges; with HCCL's sums in an order."
    yield ""
    ideal = [one for one in points if one.ahead("ideal", OURS)]
    yield f"The ideal kernels are ahead of all of ours at {len(ideal)} of {len(points)} points."
    for form in OURS:
        behind = [one for one in points if not one.ahead(form, ("CoC", "Megatron"))]
        if 0 < len(behind) <= 8:
            yield f"*{form}* is behind CoC in slices or Megatron's order at {_names(behind)}."


def _names(points: Sequence[Point]) -> str:
    return ", ".join(f"{p.machine} {p.model} TP {p.tp} {p.sequence}" for p in points)


def _gone(points: Sequence[Point]) -> Iterator[str]:
    """Of waiting and of added time, at TP 8 with 8,192 tokens, and over all points."""
    yield f"| gone: waiting, added time | {' | '.join(_GONE)} |"
    yield f"|---|{'---:|' * len(_GONE)}"
    shown = [one for one in points if (one.tp, one.sequence) == (8, 8192)]
    for name, some in [
        *((f"{one.machine} {one.model}", [one]) for one in shown),
        ("all points", points),
    ]:
        cells = (
            f"{_percent(() if form in _KERNELS else [1 - one.waiting[form] for one in there])}, "
            f"{_percent([one.added_gone(form) for one in there])}"
            for form in _GONE
            for there in [[one for one in some if form in one.shares[0]]]
        )
        yield f"| {name} | {' | '.join(cells)} |"


def _percent(shares: Sequence[float]) -> str:
    if not shares:
        return "-"
    low, high = (f"{share:.0%}" for share in (min(shares), max(shares)))
    return low if low == high else f"{low} .. {high}"


def _counts(points: Sequence[Point], form: str, others: Sequence[str]) -> str:
    there = [one for one in points if len(others) > 1 or others[0] in one.shares[0]]
    typical = sum(one.ahead(form, others) for one in there)
    everywhere = sum(one.ahead_everywhere(form, others) for one in there)
    ordered = sum(one.ahead_ordered(form, others) for one in there)
    return f"{typical}; {everywhere}; {ordered}"


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", nargs="+", default=_MACHINES)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--tp", nargs="+", type=int, default=_SIZES)
    parser.add_argument("--sequence-lengths", nargs="+", type=int, default=_SEQUENCES)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table into its section of FILE"
    )
    given = parser.parse_args(argv)
    wanted = [*product(given.machines, given.models, given.tp, given.sequence_lengths)]
    with ProcessPoolExecutor() as pool:
        hosts = pool.map(_steps, wanted)
        text = report(list(pool.map(_point, wanted)))
        text += "\n\n" + steps_report(list(hosts))
    print(text)
    if given.markdown:
        replace_section(given.markdown, "layers", text)
    return 0
