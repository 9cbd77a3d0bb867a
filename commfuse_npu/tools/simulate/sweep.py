"""Variants over sequence lengths or numbers of NPUs, as ranges over the hardware's figures.

Five machines are simulated per point: one with all typical figures, and the four combinations of
favorable and unfavorable figures for computation and communication.  A range spans the results of
these five; it is wide where the figures are uncertain.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from commfuse_npu.config_file import ConfigError
from commfuse_npu.did_you_mean import did_you_mean
from commfuse_npu.hardware.description import Choice, Hardware
from commfuse_npu.hardware.machine import min_outputs_to_hide
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.pipeline import interleaves
from commfuse_npu.tools.simulate.step import Layout, Recompute, Step, Training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant, variants
from commfuse_npu.tools.terminal import tell

__all__ = ["CORNERS", "Layout", "Options", "Outcome", "Point", "Range", "of_hardware", "sweep",
           "training"]  # fmt: skip

CORNERS: tuple[tuple[Choice, Choice], ...] = (
    ("typical", "typical"),
    ("favourable", "favourable"),
    ("favourable", "unfavourable"),
    ("unfavourable", "favourable"),
    ("unfavourable", "unfavourable"),
)
"""The choice of figures of each machine: for computation, and for links."""


class Range(NamedTuple):
    """The result at typical figures, and the lowest and highest result of the five machines."""

    low: float
    typical: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """The range of one value per machine, the typical one first."""
        return cls(min(values), values[0], max(values))

    def text(self, show: Callable[[float], str]) -> str:
        """``typical (low .. high)``."""
        if self.low == self.high:
            return show(self.typical)
        return f"{show(self.typical)} ({show(self.low)} .. {show(self.high)})"


class Outcome(NamedTuple):
    """One variant at one point.

    Attributes:
        step: seconds of a step.
        shorter: reduction of the step time relative to ``plain-mesh``; negative if it is longer.
        layer: seconds of a layer, forward and backward.
        exposed: seconds by which a step is longer than without the time of any transfer.
        tokens: per second and NPU.
        memory: bytes on the fullest NPU.
    """

    variant: Variant
    step: Range
    shorter: Range
    layer: Range
    exposed: Range
    tokens: Range
    memory: float

    def as_json(self) -> dict[str, Any]:
        """A dictionary, with ranges as dictionaries."""
        ranges = {k: v._asdict() for k, v in self._asdict().items() if isinstance(v, Range)}
        return {"variant": self.variant.name, **ranges, "memory_bytes": self.memory}


class Point(NamedTuple):
    """The results at one sequence length and one number of NPUs.

    Attributes:
        ratio: communication / computation of the tensor-parallel part of a layer, plain.
        outcomes: by name of the variant, the reference first.
    """

    sequence: int
    npus: int
    micro_batches: int
    ratio: Range
    outcomes: Mapping[str, Outcome]


@dataclass(frozen=True)
class Options:
    """Settings of a simulation besides the model and the layout.

    Attributes:
        lanes: of CommFuse; ``None``: one per peer, at most 7; 2 if the group spans nodes.
        chunks: of CommFuse.
        patterns: names of variants, such as ``commfuse-*``; the reference is always included.
        ulysses: use context parallelism with exchanged heads even if the model's file does not.
        corners: simulate all five machines, not only the typical one.
    """

    micro_batch: int | None = None
    micro_batches: int | None = None
    lanes: int | None = None
    chunks: tuple[int, ...] = (1, 2, 4)
    patterns: tuple[str, ...] = ("*",)
    recompute: Recompute = "none"
    ulysses: bool = False
    corners: bool = True


def training(model: ModelConfig, layout: Layout, sequence: int, options: Options) -> Training:
    """The simulator's description of a training: a model in a layout.

    Raises:
        ConfigError: they do not fit each other; one line per problem, with value and limit.
    """
    micro_batch = options.micro_batch or model.micro_batch_size
    global_batch = model.global_batch_size
    if options.micro_batches is not None:
        global_batch = micro_batch * options.micro_batches * layout.dp
    stages = model.num_layer_list if layout.pp == model.pipeline_model_parallel_size else None
    algorithm = model.context_parallel_algo if not options.ulysses else "ulysses_cp_algo"
    fitted = replace(
        model,
        seq_length=sequence,
        max_position_embeddings=max(sequence, model.max_position_embeddings),
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=model.sequence_parallel or layout.tp > 1,
        context_parallel_algo=algorithm,
        num_layer_list=stages,
        npus_per_node=layout.npus,
        nnodes=1,
    )
    fitted.validate()
    setup = Training(fitted, options.recompute, layout.vpp)
    if layout.vpp > 1 and (layout.pp == 1 or any(count % layout.vpp for count in setup.layers)):
        raise ConfigError(
            f"{layout.vpp} chunks do not divide the layers of {layout.pp} pipeline stages, "
            f"{', '.join(map(str, sorted(set(setup.layers))))}; choose another number of chunks"
        )
    if not interleaves(layout.pp, layout.vpp, setup.micro_batches):
        raise ConfigError(
            f"{setup.micro_batches} micro-batches are not divisible by {layout.pp} pipeline "
            "stages, as the interleaved schedule wants; choose another global batch or 1 chunk"
        )
    return setup


def of_hardware(hardware: Hardware, layout: Layout, options: Options) -> list[Variant]:
    """The requested variants, with schedules for the tensor-parallel group.

    Raises:
        ConfigError: a pattern matches no variant.
    """
    group = Group(hardware.machine(), layout.tp)
    size = group.size
    wanted = max(1, min(options.lanes or group.direct.lanes_for(size), size - 1))
    least = min_outputs_to_hide(hardware.machine(), layout.tp)
    choices = variants(size, group.members_per_node, wanted, options.chunks, least)
    names, chosen = [variant.name for variant in choices], {REFERENCE.name}
    for pattern in options.patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(
                f"no variant is called {pattern!r}; choose from {', '.join(names)}"
                f"{did_you_mean(pattern, names)}"
            )
        chosen.update(matching)
    return [variant for variant in choices if variant.name in chosen]


def sweep(
    model: ModelConfig,
    hardware: Hardware,
    layouts: Sequence[Layout],
    sequences: Sequence[int],
    options: Options,
) -> Iterator[Point]:
    """Simulate every layout at every sequence length, lazily as the iterator advances.

    Raises, before anything is simulated:
        ConfigError: a layout does not fit the model.
        ValueError: it does not fit the machine.
    """
    for layout in layouts:
        if layout.npus > hardware.npus:
            raise ValueError(
                f"{hardware.path}: nodes: TP*CP*DP*PP = {layout.tp}*{layout.cp}*{layout.dp}*"
                f"{layout.pp} = {layout.npus} NPUs are more than the {hardware.npus} of "
                f"{hardware.nodes} nodes of {hardware.npus_per_node}; choose smaller sizes, or "
                "another --hardware"
            )
    cases = [training(model, layout, length, options) for layout in layouts for length in sequences]
    return (_point(case, hardware, options) for case in cases)


def _point(setup: Training, hardware: Hardware, options: Options) -> Point:
    npus = setup.layout.npus
    corners = CORNERS if options.corners else CORNERS[:1]
    steps = [Step(hardware.machine(*corner), setup) for corner in corners]
    ideal = [step.time(COMPUTE_ONLY, free=True) for step in steps]
    plain = [step.time(REFERENCE) for step in steps]

    def outcome(variant: Variant) -> Outcome:
        times = []
        for (compute, links), step in zip(corners, steps, strict=True):
            tell(f"{npus} NPUs, {setup.model.seq_length} tokens, {compute} work, {links} links: "
                 f"{variant.name}")  # fmt: skip
            times.append(step.time(variant))
        seconds = [time.seconds for time in times]
        return Outcome(
            variant,
            step=Range.of(seconds),
            shorter=Range.of([1 - s / p.seconds for s, p in zip(seconds, plain, strict=True)]),
            layer=Range.of([time.layer for time in times]),
            exposed=Range.of([s - free.seconds for s, free in zip(seconds, ideal, strict=True)]),
            tokens=Range.of([setup.tokens_per_second(s) for s in seconds]),
            memory=footprint(setup, variant, hardware).total,
        )

    ratio = Range.of([p.layer / free.layer - 1 for p, free in zip(plain, ideal, strict=True)])
    outcomes = {form.name: outcome(form) for form in of_hardware(hardware, setup.layout, options)}
    return Point(setup.model.seq_length, npus, setup.micro_batches, ratio, outcomes)
