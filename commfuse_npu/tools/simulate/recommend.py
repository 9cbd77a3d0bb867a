"""Finds the best layout and schedule for a model on a cluster.

Every layout that fits the model, the NPUs and their memory is simulated with a few schedules of
CommFuse at typical figures, and the best layouts then with all schedules.  The result has the
shortest step, with or without CommFuse, the next best layout, and the fastest without CommFuse,
each on all five machines of the hardware's ranges (see :mod:`.sweep`).  The number of machines on
which the order is the same shows how reliable the recommendation is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

from commfuse_npu.config_file import ConfigError
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import Machine, min_outputs_to_hide
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import Footprint, footprint, limit
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.links import PlacementError
from commfuse_npu.tools.simulate.pipeline import interleaves
from commfuse_npu.tools.simulate.step import Layout, Recompute, Step, Training
from commfuse_npu.tools.simulate.sweep import (
    CORNERS,
    Options,
    Range,
    training,
)
from commfuse_npu.tools.simulate.variants import (
    COMPUTE_ONLY,
    FB_OVERLAP,
    REFERENCE,
    Variant,
    Wgrad,
    fused,
    together,
    variants,
)
from commfuse_npu.tools.terminal import tell

__all__ = ["Candidate", "Fixed", "NoLayoutError", "Recommendation", "recommend"]

_CONTEXTS = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 4, 8)
_INTERLEAVED = (2, 4)
"""Chunks per pipeline stage to try, besides 1."""
_DEFAULTS = Options()
_RANKED = 5
"""Number of layouts that are simulated in full with their best schedules; others approximately."""
_FINALISTS = 3


class NoLayoutError(ValueError):
    """No layout fits; the message counts the reasons."""


class Fixed(NamedTuple):
    """Sizes that the user has fixed; ``None`` leaves one to the search."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    recompute: Recompute | None = None


_OPEN = Fixed()


@dataclass(frozen=True)
class Candidate:
    """A training, and a variant of its tensor-parallel layers.

    Attributes:
        seconds: of a step, at typical figures.
        memory: of the fullest NPU.
    """

    training: Training
    variant: Variant
    seconds: float
    memory: Footprint


_seconds = attrgetter("seconds")


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    Attributes:
        fitting: number of layouts that fit.
        ranked: the best candidate of each of the best layouts, shortest step first; with CommFuse
            if there is anything to fuse.
        schedules: the best candidates of the best layout, shortest step first.
        rivals: for each form without CommFuse that can be launched, its shortest step over all
            layouts; shortest first.
        refused: number of layouts that do not fit, by reason.
        machines: the five machines of the hardware's ranges.
    """

    fitting: int
    ranked: tuple[Candidate, ...]
    schedules: tuple[Candidate, ...]
    rivals: tuple[Candidate, ...]
    refused: dict[str, int]
    machines: tuple[Machine, ...]

    @property
    def best(self) -> Candidate:
        """The shortest step that can be launched, with or without CommFuse."""
        return min(self.ranked[0], self.rivals[0], key=_seconds)

    @property
    def other(self) -> Candidate:
        """The shortest step without CommFuse."""
        return self.rivals[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The best candidate of the next layout, or else the next schedule."""
        following = (*self.ranked, *self.schedules)
        return next((plan for plan in following if plan not in (self.best, self.other)), None)

    @property
    def fused(self) -> Candidate | None:
        """The best candidate with a CommFuse variant, if any."""
        return next((plan for plan in self.ranked if plan.variant.ours), None)

    @cached_property
    def steps(self) -> dict[Candidate, tuple[float, ...]]:
        """Seconds on the five machines, for the candidates that are compared."""
        compared = {self.best, self.other, self.runner_up, self.fused}
        return {
            plan: tuple(
                Step(machine, plan.training).time(plan.variant).seconds for machine in self.machines
            )
            for plan in compared
            if plan is not None
        }

    @cached_property
    def ratio(self) -> Range:
        """Communication / computation of a layer of the best layout, with plain collectives."""
        steps = [Step(machine, self.best.training) for machine in self.machines]
        return Range.of([s.time(REFERENCE).layer / s.time(COMPUTE_ONLY).layer - 1 for s in steps])

    def beats(self, candidate: Candidate) -> int:
        """Number of the five machines on which the best candidate's step is shorter."""
        pairs = zip(self.steps[self.best], self.steps[candidate], strict=True)
        return sum(best < other for best, other in pairs)


def recommend(
    model: ModelConfig,
    hardware: Hardware,
    npus: int,
    *,
    sequence: int | None = None,
    options: Options = _DEFAULTS,
    fixed: Fixed = _OPEN,
    other_rounding: bool = False,
) -> Recommendation:
    """Search for the best layout and schedule.

    Args:
        npus: number of NPUs; all are used.
        sequence: tokens; the model's by default.
        options: micro-batch and number of micro-batches, if they differ from the model's.
        fixed: sizes that the user has fixed.
        other_rounding: whether to include schedules that change the rounding of weight gradients
            (``--commfuse-wgrad blocks``).

    Raises:
        NoLayoutError: no layout fits.
        ValueError: the machine has fewer NPUs, they are not whole hosts, or the fixed sizes do not
            divide them.
    """
    _check_npus(hardware, npus, fixed)
    sequence = sequence or model.seq_length
    refused: dict[str, list[str]] = {}
    by_layout: dict[Layout, list[Candidate]] = {}
    rivals: list[Candidate] = []

    for layout in _layouts(model, hardware, npus, fixed, options):
        tell(f"TP {layout.tp}, CP {layout.cp}, PP {layout.pp}, DP {layout.dp}, chunks {layout.vpp}")
        choices: tuple[Recompute, ...] = ("none", "full")
        try:
            for choice in (fixed.recompute,) if fixed.recompute else choices:
                setup = training(model, layout, sequence, replace(options, recompute=choice))
                offered = _fused(hardware, setup, other_rounding)
                plans = _candidates(hardware, setup, _quick(hardware, setup, offered), rough=True)
                rivals += _candidates(hardware, setup, _others(hardware, layout.tp))
                shortest = min(map(_seconds, by_layout.get(layout, ())), default=math.inf)
                if plans and min(map(_seconds, plans)) < shortest:
                    by_layout[layout] = plans
                # Recomputation makes room for more lanes; without that need it is never faster.
                if plans and _lanes(plans[0].variant) == max(map(_lanes, offered)):
                    break
        except (ConfigError, PlacementError) as error:
            reason = str(error).splitlines()[0].split(";")[0]
        else:
            reason = "" if layout in by_layout else "more memory than an NPU has"
        if reason and layout.vpp == 1:
            # Reasons that differ only in their numbers count as one.
            kind = " ".join(word for word in reason.split() if not any(c.isdigit() for c in word))
            refused.setdefault(kind, []).append(reason)
    counts = {
        reasons[0] + ", and the like" * (len(reasons) > 1 and reasons[0] != kind): len(reasons)
        for kind, reasons in sorted(refused.items(), key=lambda item: -len(item[1]))
    }
    if not by_layout:
        summary = "; ".join(f"{count} x {reason}" for reason, count in counts.items())
        raise NoLayoutError(
            f"no layout of {npus} NPUs fits {sequence} tokens and a global batch of "
            f"{model.global_batch_size}: {summary}; take another --npus, a shorter "
            "--sequence-length, another --micro-batch, or leave sizes open"
        )

    ordered = sorted(by_layout, key=lambda layout: min(map(_seconds, by_layout[layout])))
    # Among layouts that differ only in their chunks, keep the best.
    best_of: dict[Layout, Layout] = {}
    for layout in ordered:
        best_of.setdefault(layout._replace(vpp=1), layout)
    finalists = list(best_of.values())[:_RANKED]
    for place, layout in enumerate(finalists, 1):
        tell(f"the best layouts in full: {place} of {_RANKED}")
        setup = by_layout[layout][0].training
        trials = _candidates(hardware, setup, _fused(hardware, setup, other_rounding), rough=True)
        best = [trial.variant for trial in sorted(trials, key=_seconds)[:_FINALISTS]]
        by_layout[layout] = _candidates(hardware, setup, best)
    ranked = sorted((min(by_layout[layout], key=_seconds) for layout in finalists), key=_seconds)
    by_form: dict[str, Candidate] = {}
    for rival in sorted(rivals, key=_seconds):
        by_form.setdefault(rival.variant.kind, rival)
    return Recommendation(
        len(best_of),
        tuple(ranked),
        tuple(sorted(by_layout[ranked[0].training.layout], key=_seconds)),
        tuple(by_form.values()),
        counts,
        tuple(hardware.machine(*corner) for corner in CORNERS),
    )


def _check_npus(hardware: Hardware, npus: int, fixed: Fixed) -> None:
    host = hardware.npus_per_host
    if not 1 <= npus <= hardware.npus:
        raise ValueError(
            f"--npus {npus}: {hardware.path} describes {hardware.nodes} nodes of "
            f"{hardware.npus_per_node}; choose from 1 to {hardware.npus}"
        )
    if npus > host and npus % host:
        below = npus // host * host
        raise ValueError(
            f"--npus {npus} is more than a host of {host} and not whole hosts; choose {below} or "
            f"{below + host}"
        )
    sizes = ("tp", "cp", "pp")
    sizes_given = {f"--{name}": size for name in sizes if (size := getattr(fixed, name))}
    product = math.prod(sizes_given.values())
    if npus % product:
        factors = " times ".join(f"{option} {size}" for option, size in sizes_given.items())
        raise ValueError(
            f"--npus {npus} is not divisible by {factors} = {product}; choose others, or leave "
            "them open"
        )


def _layouts(
    model: ModelConfig, hardware: Hardware, npus: int, fixed: Fixed, options: Options
) -> Iterator[Layout]:
    """Every division of the NPUs; whether it fits the model is checked later.

    Tensor parallelism stays inside a node unless it is fixed.  Interleaved pipelines are included
    if they divide layers and micro-batches.
    """
    tps = [fixed.tp] if fixed.tp else _divisors(min(npus, hardware.npus_per_node))
    cps = [fixed.cp] if fixed.cp else _CONTEXTS
    pps = [fixed.pp] if fixed.pp else _divisors(model.num_layers)
    stages = model.pipeline_model_parallel_size
    if stages not in pps and not fixed.pp:
        pps.append(stages)
    for tp in tps:
        for cp in cps:
            for pp in pps:
                dp, remainder = divmod(npus, tp * cp * pp)
                if remainder:
                    continue
                yield Layout(tp, cp, dp, pp)
                default = model.global_batch_size // (
                    (options.micro_batch or model.micro_batch_size) * dp
                )
                batches = options.micro_batches or default
                even = pp != stages or model.num_layer_list is None
                for vpp in _INTERLEAVED if even and pp > 1 else ():
                    if model.num_layers % (pp * vpp) == 0 and interleaves(pp, vpp, batches):
                        yield Layout(tp, cp, dp, pp, vpp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _fused(hardware: Hardware, setup: Training, other_rounding: bool) -> list[Variant]:
    """CommFuse's variants; without tensor parallelism the reference."""
    layout = setup.layout
    group = Group(hardware.machine(), layout.tp)
    if group.size == 1:
        return [REFERENCE]
    base, shapes = group.direct, [group.direct]
    if base.shape == "two_level":
        shapes.insert(0, replace(base, lanes=1))
    elif layout.cp == 1:
        shapes = [*together(base, group.size), base]
    wgrads: tuple[Wgrad, ...] = ("whole", "blocks") if other_rounding else ("whole",)
    ours = partial(fused, collectives_from=min_outputs_to_hide(hardware.machine(), layout.tp))
    choices: list[Variant] = [
        ours(replace(shape, chunks=chunks, taper=taper), wgrad=wgrad)
        for shape in shapes
        for chunks, taper in (*((chunks, 1.0) for chunks in _CHUNKS), (4, 2.0))
        for wgrad in wgrads
    ]
    if layout.tp > 1 and setup.micro_batches > 1:
        choices.append(FB_OVERLAP)
    return choices


def _lanes(variant: Variant) -> int:
    return (variant.schedule.lanes or 1) if variant.schedule else 0


def _quick(hardware: Hardware, setup: Training, offered: Sequence[Variant]) -> list[Variant]:
    """The few variants to try for every layout: simple ones, with the most lanes that fit."""
    picks: dict[Hashable, Variant] = {}
    for variant in offered:
        schedule = variant.schedule
        if schedule is None:
            picks[variant] = variant
            continue
        simple = schedule.taper == 1 and schedule.chunks <= 4
        if simple and footprint(setup, variant, hardware).total <= limit(hardware):
            # The offered variants are sorted by lanes: later ones replace those with fewer.
            picks[schedule.chunks, variant.wgrad] = variant
    return list(picks.values())


def _others(hardware: Hardware, tp: int) -> list[Variant]:
    """The variants without CommFuse that can be launched."""
    if tp == 1:
        return [REFERENCE]
    choices = variants(tp, Group(hardware.machine(), tp).members_per_node, 1)
    return [form for form in choices if form.role in ("today", "rival")]


def _candidates(
    hardware: Hardware, setup: Training, chosen: Sequence[Variant], *, rough: bool = False
) -> list[Candidate]:
    """The candidates that fit into memory, with their step times at typical figures."""
    step = Step(hardware.machine(), setup, rough=rough)
    sized = ((variant, footprint(setup, variant, hardware)) for variant in chosen)
    return [
        Candidate(setup, variant, step.time(variant).seconds, memory)
        for variant, memory in sized
        if memory.total <= limit(hardware)
    ]
