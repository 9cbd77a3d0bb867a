"""Which layout and which schedule for a model on a cluster?

Every layout that fits the model, the NPUs and their memory is simulated with a few schedules of
CommFuse, at typical figures; the best layouts then with all of them.  A recommendation names the
shortest step, ours or not, the next best layout, and what is fastest without CommFuse, each on all
five machines of the hardware's ranges (see :mod:`.sweep`): how often the order stays the same says
how much it is worth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from commfuse_npu.config_file import ConfigError, config_names, find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import covering_outputs
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import Footprint, footprint, limit
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.links import PlacementError
from commfuse_npu.tools.simulate.pipeline_parallel import interleaves
from commfuse_npu.tools.simulate.step import Layout, Recompute, Shared, Step, Training
from commfuse_npu.tools.simulate.sweep import (
    CORNERS,
    Options,
    Range,
    best_lanes,
    fused_group,
    training,
)
from commfuse_npu.tools.simulate.variants import (
    CATCCOS,
    COMPUTE_ONLY,
    REFERENCE,
    TURNS,
    Variant,
    Wgrad,
    fused,
    variants,
)

__all__ = ["Candidate", "Fixed", "NoLayoutError", "Recommendation", "Refused", "recommend"]

_CONTEXTS = (1, 2, 4, 8, 16)
_CHUNKS = (1, 2, 4, 8)
_INTERLEAVED = (2, 4)
"""Chunks per pipeline stage besides 1."""
_DEFAULTS = Options()
_RANKED = 5
"""So many layouts are simulated in full, each with its best schedules; the rest roughly."""
_FINALISTS = 3


class NoLayoutError(ValueError):
    """No layout fits; the message counts why."""


class Fixed(NamedTuple):
    """Sizes that are not to be chosen; ``None`` leaves one open."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    recompute: Recompute | None = None


_OPEN = Fixed()


class Refused:
    """Layouts that do not fit, counted by reason, each with the first one's own words."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, why: str) -> None:
        first = why.splitlines()[0].split(";")[0]
        # Reasons are the same that differ in their numbers only.
        kind = " ".join(word for word in first.split() if not any(c.isdigit() for c in word))
        self._counts[kind] += 1
        self._first.setdefault(kind, first)

    def __str__(self) -> str:
        """``12 x more memory than an NPU has, 3 x ...``; empty if there is none."""
        return "; ".join(
            f"{count} x {self._first[kind]}"
            + (", and the like" if count > 1 and self._first[kind] != kind else "")
            for kind, count in self._counts.most_common()
        )

    def as_json(self) -> dict[str, int]:
        return {self._first[kind]: count for kind, count in self._counts.items()}


@dataclass(frozen=True)
class Candidate:
    """A layout with a way to run its tensor-parallel layers.

    Attributes:
        seconds: of a step, at typical figures.
        memory: of the fullest NPU.
    """

    training: Training
    variant: Variant
    seconds: float
    memory: Footprint

    @property
    def layout(self) -> Layout:
        return self.training.layout

    @property
    def recompute(self) -> Recompute:
        return self.training.recompute


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        fitting: how many layouts fit.
        ranked: the best candidates of the best layouts, shortest step first, with CommFuse where
            there is anything to fuse.
        schedules: the best candidates of the best layout, shortest step first.
        rivals: the shortest step, over all layouts, of each form without CommFuse that can be
            launched, shortest first.
        bound: that of ideal kernels, which nobody can launch; ``None`` without any.
        refused: how many layouts do not fit, by reason; see :class:`Refused`.
        ratio: communication / computation of a layer of the best layout, plain collectives.
        steps: seconds on the five machines, of what :meth:`beats` compares.
    """

    fitting: int
    ranked: tuple[Candidate, ...]
    schedules: tuple[Candidate, ...]
    rivals: tuple[Candidate, ...]
    bound: Candidate | None
    refused: Refused
    ratio: Range
    steps: dict[Candidate, tuple[float, ...]]

    @property
    def best(self) -> Candidate:
        """The shortest step of what can be launched, with CommFuse or without."""
        return _fastest((self.ranked[0], self.rivals[0]))

    @property
    def other(self) -> Candidate:
        """The shortest step without CommFuse."""
        return self.rivals[0]

    @property
    def runner_up(self) -> Candidate | None:
        """The next best candidate of a layout, or without one the next schedule."""
        following = (*self.ranked, *self.schedules)
        return next((one for one in following if one not in (self.best, self.other)), None)

    @property
    def fused(self) -> Candidate | None:
        """The best candidate that has something to fuse."""
        return next((one for one in self.ranked if one.variant.ours), None)

    def beats(self, candidate: Candidate) -> int:
        """On how many of the five machines the best candidate's step is shorter."""
        pairs = zip(self.steps[self.best], self.steps[candidate], strict=True)
        return sum(mine < theirs for mine, theirs in pairs)


def recommend(
    model: ModelConfig,
    hardware: Hardware,
    npus: int,
    *,
    sequence: int | None = None,
    options: Options = _DEFAULTS,
    fixed: Fixed = _OPEN,
    other_rounding: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Recommendation:
    """Search.

    Args:
        npus: how many there are; all are used.
        sequence: tokens; the model's by default.
        options: micro-batch, and number of micro-batches, if they are not the model's.
        fixed: sizes that are given.
        other_rounding: whether schedules may be chosen that change the rounding of weight
            gradients (``--commfuse-wgrad blocks``).
        tell: is told what comes next.

    Raises:
        NoLayoutError: none fits.
        ValueError: the machine has not so many NPUs, they are not whole hosts, or what is given
            does not divide them.
    """
    _check_npus(hardware, npus, fixed)
    sequence = sequence or model.seq_length
    refused = Refused()
    found: dict[Layout, list[Candidate]] = {}
    others: list[Candidate] = []
    shared: Shared = {}

    for layout in _layouts(model, hardware, npus, fixed, options):
        tell(f"TP {layout.tp}, CP {layout.cp}, PP {layout.pp}, DP {layout.dp}, chunks {layout.vpp}")
        choices: tuple[Recompute, ...] = ("none", "full")
        try:
            for choice in (fixed.recompute,) if fixed.recompute else choices:
                what = training(model, layout, sequence, replace(options, recompute=choice))
                offered = _fused(hardware, what, other_rounding)
                quick = _quick(model, hardware, what, offered, shared)
                rows = _played(model, hardware, what, quick, shared, rough=True)
                others += _played(model, hardware, what, _others(hardware, layout.tp), shared)
                known = found.get(layout)
                if rows and (not known or _fastest(rows).seconds < _fastest(known).seconds):
                    found[layout] = rows
                # Recomputation makes room for lanes; where they have it, it is never faster.
                if rows and _lanes(rows[0].variant) == max(map(_lanes, offered)):
                    break
        except (ConfigError, PlacementError) as error:
            why = str(error)
        else:
            why = "" if layout in found else "more memory than an NPU has"
        if why and layout.vpp == 1:
            refused.add(why)
    if not found:
        raise NoLayoutError(
            f"no layout of {npus} NPUs fits {sequence} tokens and a global batch of "
            f"{model.global_batch_size}: {refused}; take another --npus, a shorter "
            "--sequence-length, another --micro-batch, or leave sizes open"
        )

    ordered = sorted(found, key=lambda layout: _fastest(found[layout]).seconds)
    # Of layouts that differ in their chunks only, the best.
    best_of: dict[Layout, Layout] = {}
    for layout in ordered:
        best_of.setdefault(layout._replace(vpp=1), layout)
    ordered = list(best_of.values())
    for place, layout in enumerate(ordered[:_RANKED], 1):
        tell(f"the best layouts in full: {place} of {_RANKED}")
        what = found[layout][0].training
        every = _played(
            model, hardware, what, _fused(hardware, what, other_rounding), shared, rough=True
        )
        best = [one.variant for one in sorted(every, key=_seconds)[:_FINALISTS]]
        found[layout] = _played(model, hardware, what, best, shared)
    ranked = sorted((_fastest(found[layout]) for layout in ordered[:_RANKED]), key=_seconds)
    schedules = tuple(sorted(found[ranked[0].layout], key=_seconds))
    by_form: dict[str, list[Candidate]] = {}
    for one in others:
        by_form.setdefault(one.variant.kind, []).append(one)
    bounds = by_form.pop("ideal", [])
    rivals = tuple(sorted(map(_fastest, by_form.values()), key=_seconds))
    result = Recommendation(
        len(best_of),
        tuple(ranked),
        schedules,
        rivals,
        _fastest(bounds) if bounds else None,
        refused,
        _ratio(hardware, _fastest((ranked[0], rivals[0]))),
        {},
    )
    compared = {result.best, result.other, result.runner_up, result.fused}
    steps = {one: _on_all_machines(hardware, one) for one in compared if one is not None}
    return replace(result, steps=steps)


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=_seconds)


def _check_npus(hardware: Hardware, npus: int, fixed: Fixed) -> None:
    host = hardware.npus_per_host
    if not 1 <= npus <= hardware.npus:
        larger = [one for one in config_names("hardware") if _holds(one, npus)]
        raise ValueError(
            f"--npus {npus}: {hardware.path} describes {hardware.nodes} nodes of "
            f"{hardware.npus_per_node}; choose from 1 to {hardware.npus}"
            + (f", or --hardware {' or '.join(larger)}" if larger and npus > 0 else "")
        )
    if npus > host and npus % host:
        below = npus // host * host
        raise ValueError(
            f"--npus {npus} is more than a host of {host} and not whole hosts; choose {below} or "
            f"{below + host}"
        )
    sizes = ("tp", "cp", "pp")
    given = {f"--{name}": size for name in sizes if (size := getattr(fixed, name))}
    product = math.prod(given.values())
    if npus % product:
        said = " times ".join(f"{option} {size}" for option, size in given.items())
        raise ValueError(
            f"--npus {npus} is not divisible by {said} = {product}; choose others, or leave them "
            "open"
        )


def _holds(name: str, npus: int) -> bool:
    """Whether a shipped description has so many NPUs."""
    return Hardware.load(find_config(name, "hardware")).npus >= npus


def _layouts(
    model: ModelConfig, hardware: Hardware, npus: int, fixed: Fixed, options: Options
) -> Iterator[Layout]:
    """Every way to divide the NPUs; whether the model can be divided so is asked later.

    Tensor parallelism stays inside a node unless it is given.  Interleaved pipelines are there
    where layers and micro-batches divide.
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
                dp, left = divmod(npus, tp * cp * pp)
                if left:
                    continue
                yield Layout(tp, cp, dp, pp)
                given = model.global_batch_size // (
                    (options.micro_batch or model.micro_batch_size) * dp
                )
                batches = options.micro_batches or given
                even = pp != stages or model.num_layer_list is None
                for vpp in _INTERLEAVED if even and pp > 1 else ():
                    if model.num_layers % (pp * vpp) == 0 and interleaves(pp, vpp, batches):
                        yield Layout(tp, cp, dp, pp, vpp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _fused(hardware: Hardware, what: Training, other_rounding: bool) -> list[Variant]:
    """CommFuse's schedules, for tensor parallelism or else for Ulysses; what there is instead."""
    group = fused_group(hardware, what.layout, what.fuse_ulysses)
    if group.size == 1:
        return [REFERENCE]
    size, base = group.size, group.direct
    best = best_lanes(hardware, size)
    every = sorted({1, min(2, size - 1), best})
    wgrads: tuple[Wgrad, ...] = ("whole", "blocks") if other_rounding else ("whole",)
    ours = partial(fused, base, collectives_from=covering_outputs(hardware.machine(), what.tp))
    found = [
        ours(lanes, chunks, taper=taper, wgrad=wgrad)
        for lanes in every
        for chunks, taper in (*((chunks, 1.0) for chunks in _CHUNKS), (4, 2.0))
        for wgrad in wgrads
    ]
    if what.cp == 1 and what.tp > 1:  # else attention has transfers of its own
        found += [
            ours(best, chunks, attention=True, wgrad=wgrad)
            for chunks in (1, 2, 4)
            for wgrad in wgrads
        ]
    if what.tp > 1 and what.micro_batches > 1:
        found.append(TURNS)
    return found


def _lanes(variant: Variant) -> int:
    return (variant.schedule.lanes or 1) if variant.schedule else 0


def _quick(
    model: ModelConfig,
    hardware: Hardware,
    what: Training,
    offered: Sequence[Variant],
    shared: Shared,
) -> list[Variant]:
    """The few schedules that every layout is tried with: simple ones, with all lanes that fit."""
    found: dict[Hashable, Variant] = {}
    for variant in offered:
        schedule = variant.schedule
        if schedule is None:
            found[variant] = variant
            continue
        even = schedule.taper == 1 and schedule.chunks <= 4
        simple = even and not variant.attention and not variant.tuned
        if simple and footprint(model, what, variant, hardware, shared).total <= limit(hardware):
            # Lanes rise in what is offered: more of them replace fewer.
            found[schedule.chunks, variant.wgrad] = variant
    return list(found.values())


def _others(hardware: Hardware, tp: int) -> list[Variant]:
    members = Group(hardware.machine(), tp).members_per_node
    found = variants(tp, members, 1) if tp > 1 else [REFERENCE]
    # Nobody can launch CoC tuned for each operation, catccos, nor plain collectives with Megatron.
    kinds = ("megatron", "sliced", "kernel", "mc2", "ideal")
    launched = (one for one in found if one.kind in kinds and not one.tuned and one != CATCCOS)
    return list(launched) if tp > 1 else found


def _played(
    model: ModelConfig,
    hardware: Hardware,
    what: Training,
    chosen: Sequence[Variant],
    shared: Shared,
    *,
    rough: bool = False,
) -> list[Candidate]:
    """What fits into memory, with its step at typical figures."""
    step = Step(hardware.machine(), what, rough=rough, shared=shared)
    found = []
    for variant in chosen:
        memory = footprint(model, what, variant, hardware, shared)
        if memory.total <= limit(hardware):
            found.append(Candidate(what, variant, step.time(variant).seconds, memory))
    return found


def _on_all_machines(hardware: Hardware, candidate: Candidate) -> tuple[float, ...]:
    return tuple(
        Step(hardware.machine(compute, links), candidate.training).time(candidate.variant).seconds
        for compute, links in CORNERS
    )


def _ratio(hardware: Hardware, candidate: Candidate) -> Range:
    found = []
    for compute, links in CORNERS:
        step = Step(hardware.machine(compute, links), candidate.training)
        plain, ideal = step.time(REFERENCE).layer, step.time(COMPUTE_ONLY).layer
        found.append(plain / ideal - 1)
    return Range.of(found)
