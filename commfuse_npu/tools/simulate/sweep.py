"""Variants over sequence lengths, or over numbers of NPUs, as ranges over the hardware's figures.

Five machines are simulated per point: all figures typical, and the four corners of computation and
communication at their favourable and unfavourable ends.  A range is what these five give; it is
wide where the figures are uncertain, and that is what it is for.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from commfuse_npu.config_file import ConfigError
from commfuse_npu.hardware.description import Choice, Hardware
from commfuse_npu.hardware.machine import covering_outputs
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.data_parallel import DataParallel
from commfuse_npu.tools.simulate.footprint import buffers, communicators
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.pipeline_parallel import interleaves
from commfuse_npu.tools.simulate.step import Layout, Recompute, Step, Training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant, variants

__all__ = ["CORNERS", "Layout", "Options", "Outcome", "Point", "Range", "best_lanes",
           "fused_group", "of_hardware", "sweep", "training"]  # fmt: skip

CORNERS: tuple[tuple[Choice, Choice], ...] = (
    ("typical", "typical"),
    ("favourable", "favourable"),
    ("favourable", "unfavourable"),
    ("unfavourable", "favourable"),
    ("unfavourable", "unfavourable"),
)
"""Which ends of the ranges: of computation, of links."""


class Range(NamedTuple):
    """What the typical figures give, and the least and the most that any corner gives."""

    low: float
    typical: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Of the values of the corners, the typical one first; NaN stands for: not defined."""
        known = [value for value in values if not math.isnan(value)] or [math.nan]
        return cls(min(known), values[0], max(known))


@dataclass(frozen=True)
class Outcome:
    """One variant at one point.

    Attributes:
        step: seconds of a step.
        shorter: share of the time of ``plain-mesh`` that a step is shorter; negative if longer.
        layer: seconds of a layer, forward and backward.
        exposed: seconds of a step that there would not be if no transfer took time.
        removed: share of what the transfers inside layers (tensor and context parallelism) add to
            ``plain-mesh`` that is gone; negative if there is more of it.
        mfu: model FLOP per second as a share of the peak.
        tokens: per second and NPU.
        buffers, communicators: bytes of tensors, and of what lanes allocate.
    """

    variant: str
    step: Range
    shorter: Range
    layer: Range
    exposed: Range
    removed: Range
    mfu: Range
    tokens: Range
    buffers: float
    communicators: float

    def as_json(self) -> dict[str, Any]:
        """With ranges as mappings; NaN as null."""

        def plain(value: Any) -> Any:
            if isinstance(value, Range):
                return {k: None if math.isnan(v) else v for k, v in value._asdict().items()}
            return value

        return {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Point:
    """What was simulated at one sequence length and one number of NPUs.

    Attributes:
        ratio: communication / computation of a layer's tensor-parallel part, plain.
    """

    sequence: int
    npus: int
    micro_batches: int
    ratio: Range
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Options:
    """What is simulated besides the model and the layout.

    Attributes:
        lanes: of CommFuse; ``None``: all peers at once on a full mesh, else 2.
        chunks: of CommFuse.
        patterns: names of variants, ``commfuse-*``; the reference is always there.
        ulysses: context parallelism by exchanging heads, whatever the model's file says, and
            whether CommFuse's variants fuse that.
        corners: whether ranges are wanted, or only typical figures.
    """

    micro_batch: int | None = None
    micro_batches: int | None = None
    lanes: int | None = None
    chunks: tuple[int, ...] = (1, 2, 4)
    patterns: tuple[str, ...] = ("*",)
    recompute: Recompute = "none"
    ulysses: Literal["none", "plain", "fused"] = "none"
    data_parallel: DataParallel = "overlapped"
    corners: bool = True


def training(model: ModelConfig, layout: Layout, sequence: int, options: Options) -> Training:
    """What the simulator needs to know of a model and a layout.

    Raises:
        ConfigError: they do not fit each other; a line per problem with value and limit.
    """
    micro_batch = options.micro_batch or model.micro_batch_size
    global_batch = model.global_batch_size
    if options.micro_batches is not None:
        global_batch = micro_batch * options.micro_batches * layout.dp
    stages = model.num_layer_list if layout.pp == model.pipeline_model_parallel_size else None
    algorithm = model.context_parallel_algo if options.ulysses == "none" else "ulysses_cp_algo"
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
    micro_batches = global_batch // (micro_batch * layout.dp)
    layers = stages or (model.num_layers // layout.pp,) * layout.pp
    _check_interleaving(layout, layers, micro_batches)
    head = model.hidden_size // model.num_attention_heads
    qkv = head * (model.num_attention_heads + 2 * model.num_query_groups)
    hidden = model.hidden_size
    of_layer = hidden * (qkv + hidden + 3 * model.ffn_hidden_size + 2)
    return Training(
        layers=layers,
        hidden=hidden,
        feed_forward=model.ffn_hidden_size,
        qkv=qkv,
        vocabulary=fitted.padded_vocab_size,
        key_value=head * model.num_query_groups,
        parameters=model.number_of_parameters
        - (model.vocab_size * hidden if model.untie_embeddings_and_output_weights else 0),
        layer_parameters=of_layer,
        sequence=sequence,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        tp=layout.tp,
        cp=layout.cp,
        dp=layout.dp,
        groups=model.num_query_groups,
        tied=not model.untie_embeddings_and_output_weights,
        ulysses=fitted.context_parallel_algo == "ulysses_cp_algo",
        fuse_ulysses=options.ulysses == "fused",
        recompute=options.recompute,
        data_parallel=options.data_parallel,
        vpp=layout.vpp,
    )


def _check_interleaving(layout: Layout, layers: Sequence[int], micro_batches: int) -> None:
    if layout.vpp == 1:
        return
    if layout.pp == 1 or any(count % layout.vpp for count in layers):
        raise ConfigError(
            f"{layout.vpp} chunks do not divide the layers of {layout.pp} pipeline stages, "
            f"{', '.join(map(str, sorted(set(layers))))}; choose another number of chunks"
        )
    if not interleaves(layout.pp, layout.vpp, micro_batches):
        raise ConfigError(
            f"{micro_batches} micro-batches are not divisible by {layout.pp} pipeline stages, as "
            "the interleaved schedule wants; choose another global batch or 1 chunk"
        )


def best_lanes(hardware: Hardware, size: int) -> int:
    """All peers at once, as far as the default goes: what is together goes into one GEMM."""
    return Group(hardware.machine(), size).direct.lanes_for(size)


def fused_group(hardware: Hardware, layout: Layout, fuse_ulysses: bool) -> Group:
    """The group that schedules are made for.

    That of tensor parallelism; of context parallelism if the first has one rank and Ulysses is
    fused.
    """
    alone = layout.tp == 1 and fuse_ulysses
    return Group(hardware.machine(), layout.cp if alone else layout.tp)


def of_hardware(hardware: Hardware, layout: Layout, options: Options) -> list[Variant]:
    """The variants that are asked for, with schedules for :func:`fused_group`.

    Raises:
        ConfigError: a pattern that names none.
    """
    group = fused_group(hardware, layout, options.ulysses == "fused")
    size = group.size
    wanted = max(1, min(options.lanes or best_lanes(hardware, size), size - 1))
    least = covering_outputs(hardware.machine(), layout.tp)
    found = variants(size, group.members_per_node, wanted, options.chunks, least)
    names, chosen = [variant.name for variant in found], {REFERENCE.name}
    for pattern in options.patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"no variant is called {pattern!r}; choose from {', '.join(names)}")
        chosen.update(matching)
    return [variant for variant in found if variant.name in chosen]


def sweep(
    model: ModelConfig,
    hardware: Hardware,
    layouts: Sequence[Layout],
    sequences: Sequence[int],
    options: Options,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Point]:
    """Simulate every layout at every sequence length, one by one as the iterator is asked.

    Args:
        tell: is told what comes next.

    Raises, before anything is simulated:
        ConfigError: the layout does not fit the model.
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
    asked = [training(model, layout, length, options) for layout in layouts for length in sequences]
    return (_point(what, hardware, options, tell) for what in asked)


def _point(
    what: Training, hardware: Hardware, options: Options, tell: Callable[[str], None]
) -> Point:
    chosen = of_hardware(hardware, what.layout, options)
    found: dict[str, list[dict[str, float]]] = {variant.name: [] for variant in chosen}
    ratios = []
    for compute, links in CORNERS if options.corners else CORNERS[:1]:
        machine = hardware.machine(compute, links)
        step = Step(machine, what)
        ideal, free = step.time(COMPUTE_ONLY, free=True), step.time(COMPUTE_ONLY)
        reference = step.time(REFERENCE)
        overhead = reference.seconds - free.seconds
        ratios.append(reference.layer / ideal.layer - 1)
        for variant in chosen:
            tell(f"{what.npus} NPUs, {what.sequence} tokens, {compute} work, {links} links: "
                 f"{variant.name}")  # fmt: skip
            took = reference if variant == REFERENCE else step.time(variant)
            found[variant.name].append(
                {
                    "step": took.seconds,
                    "shorter": 1 - took.seconds / reference.seconds,
                    "layer": took.layer,
                    "exposed": took.seconds - ideal.seconds,
                    "removed": _share(reference.seconds - took.seconds, overhead),
                    "mfu": what.flops / (took.seconds * what.npus * machine.cube_flops),
                    "tokens": what.tokens / (took.seconds * what.npus),
                }
            )
    outcomes = tuple(
        Outcome(
            variant=variant.name,
            **{
                name: Range.of([one[name] for one in found[variant.name]])
                for name in found[variant.name][0]
            },
            buffers=buffers(variant, step),
            communicators=communicators(variant, step, hardware),
        )
        for variant in chosen
    )
    return Point(what.sequence, what.npus, what.micro_batches, Range.of(ratios), outcomes)


def _share(gone: float, of: float) -> float:
    """``gone / of``; NaN where there was nothing."""
    return gone / of if of > 0 else math.nan
