"""A recommendation as text: the layouts, the reason, and the options of the launch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import USABLE, limit
from commfuse_npu.tools.simulate.recommend import Candidate, Recommendation
from commfuse_npu.tools.simulate.step import Training
from commfuse_npu.tools.simulate.sweep import CORNERS
from commfuse_npu.tools.simulate.variants import Variant

__all__ = ["COLUMNS", "as_json", "fitting", "launching", "layouts", "options", "reasons", "report"]

COLUMNS = (
    *("", "TP", "CP", "PP", "DP", "recompute", "schedule", "step", "tokens/s/NPU", "MFU"),
    "memory of an NPU",
)


def report(found: Recommendation, model: ModelConfig, path: Path, hardware: Hardware) -> str:
    """Tables, reason and options, in Markdown.

    Args:
        path: of the model's description.
    """
    best = found.best
    lines = [
        f"{path.stem}, {best.training.sequence} tokens, {best.layout.npus} NPUs of "
        f"{hardware.name}. Simulated, not measured: {hardware.assumed} of {hardware.path.name} are "
        "assumed.",
        "",
        *_layouts(found, hardware),
        "",
        *_schedules(found),
        *reasons(found),
        "",
        "Options of pretrain_gpt.py:",
        "",
        f"    {' '.join(options(model, best))}",
    ]
    return "\n".join(lines)


def options(model: ModelConfig, chosen: Candidate) -> list[str]:
    """Layout, recomputation and schedule as options of ``pretrain_gpt.py``."""
    layout = chosen.layout
    given = [
        *("--tensor-model-parallel-size", str(layout.tp)),
        *("--pipeline-model-parallel-size", str(layout.pp)),
        *("--context-parallel-size", str(layout.cp)),
        *(("--context-parallel-algo", model.context_parallel_algo) if layout.cp > 1 else ()),
        *(("--sequence-parallel",) if layout.tp > 1 else ()),
        "--use-distributed-optimizer",
        *_chosen(model, chosen),
    ]
    if stages := _uneven(chosen):
        given += ["--num-layer-list", stages]
    return [*given, *launching(chosen.variant, chosen.training)]


def _uneven(chosen: Candidate) -> str:
    """Layers of each stage, if they differ; else empty."""
    layers = chosen.training.layers
    return ",".join(map(str, layers)) if len(set(layers)) > 1 else ""


def _chosen(model: ModelConfig, chosen: Candidate) -> Iterator[str]:
    """What differs from the model's description besides its layout."""
    training = chosen.training
    if training.sequence != model.seq_length:
        longest = max(training.sequence, model.max_position_embeddings)
        yield from ("--seq-length", str(training.sequence))
        yield from ("--max-position-embeddings", str(longest))
    if training.micro_batch != model.micro_batch_size:
        yield from ("--micro-batch-size", str(training.micro_batch))
    batch = training.micro_batch * training.micro_batches * chosen.layout.dp
    if batch != model.global_batch_size:
        yield from ("--global-batch-size", str(batch))
    if chosen.layout.dp * chosen.layout.cp > 1:
        # As it was simulated.
        yield from ("--overlap-grad-reduce", "--overlap-param-gather")
    if chosen.layout.vpp > 1:
        each = training.layers[0] // chosen.layout.vpp
        yield from ("--num-layers-per-virtual-pipeline-stage", str(each))
    if chosen.recompute == "full":
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform")
        yield from ("--recompute-num-layers", "1")


def launching(variant: Variant, training: Training) -> Iterator[str]:
    """A way to run the layers as options of ``pretrain_gpt.py``; none for Megatron's own order."""
    schedule = variant.schedule
    if variant.kind == "sliced":
        yield from ("--use-ascend-coc", "--coc-parallel-num", str(variant.slices))
    elif variant.kind == "kernel":
        yield from ("--use-ascend-coc", "--coc-fused-kernel")
    elif variant.kind == "mc2":
        yield "--use-ascend-mc2"
    elif variant.kind == "turns":
        yield "--commfuse-fb-overlap"
        if len(training.layers) > 1 and training.vpp == 1:
            yield "--commfuse-fb-overlap-memory"
    elif schedule is not None:
        yield "--use-commfuse"
        yield from _fusing(variant, schedule, training)


def _fusing(variant: Variant, schedule: Schedule, training: Training) -> Iterator[str]:
    yield from ("--commfuse-lanes", str(schedule.lanes))
    if variant.tuned:
        yield from ("--commfuse-tuning", "on")
    else:
        yield from ("--commfuse-chunks", str(schedule.chunks))
    if variant.collectives_from and training.tp > 1:
        yield from ("--commfuse-collectives-from", str(variant.collectives_from))
    if schedule.taper != 1:
        yield from ("--commfuse-taper", f"{schedule.taper:g}")
    if variant.attention:
        yield "--commfuse-attention"
    if training.fuse_ulysses and training.cp > 1:
        yield "--commfuse-ulysses"
    if variant.wgrad != "whole":
        yield from ("--commfuse-wgrad", variant.wgrad)
    if variant.sums == "once":
        yield from ("--commfuse-reduce-dtype", "float32")
    if training.data_parallel == "commfuse":
        yield "--commfuse-dp"


def as_json(found: Recommendation, model: ModelConfig) -> dict[str, object]:
    """What is recommended, and all candidates that were kept, the shortest step first."""

    def plain(one: Candidate) -> dict[str, object]:
        return {
            "layout": one.layout._asdict(),
            "variant": one.variant.name,
            "recompute": one.recompute,
            "step_seconds": one.seconds,
            "step_seconds_on_all_machines": found.steps.get(one),
            "memory_bytes": one.memory.total,
            "options": options(model, one),
        }

    return {
        "simulated": True,
        "recommended": plain(found.best),
        "layouts": [plain(one) for one in found.ranked],
        "schedules": [plain(one) for one in found.schedules],
        "without_commfuse": [plain(one) for one in found.rivals],
        "bound": found.bound and plain(found.bound) | {"options": None},
        "communication_per_computation": found.ratio._asdict(),
        "refused": found.refused.as_json(),
    }


# ------------------------------------------------------------------------ parts


def _layouts(found: Recommendation, hardware: Hardware) -> Iterator[str]:
    yield table_row(COLUMNS)
    yield "|---|---:|---:|---:|---:|---|---|---:|---:|---:|---:|"
    yield from (table_row(cells) for _, _, cells in layouts(found, hardware))
    yield ""
    yield fitting(found, hardware)


def layouts(
    found: Recommendation, hardware: Hardware
) -> Iterator[tuple[str, Candidate, tuple[str, ...]]]:
    """What each candidate is (a place, ``without CommFuse``, a bound), and a row of cells."""
    peak = hardware.typical("npu.cube_flops")

    def row(place: str, one: Candidate) -> tuple[str, Candidate, tuple[str, ...]]:
        training = one.training
        name = f"**{one.variant.name}**" if one is found.best else one.variant.name
        npu_seconds = one.seconds * training.npus
        tp, cp, dp, _, _ = map(str, one.layout)
        rates = (
            f"{training.tokens / npu_seconds:.0f}",
            f"{training.flops / (npu_seconds * peak):.1%}",
            f"{one.memory.total / 2**30:.1f} GiB",
        )
        sizes = place, tp, cp, _pipeline(one), dp
        return place, one, (*sizes, one.recompute, name, _seconds(one.seconds), *rates)

    for place, one in enumerate(found.ranked, 1):
        yield row(str(place), one)
    for one in found.rivals:
        yield row("without CommFuse", one)
    if found.bound is not None:
        yield row("bound, cannot be launched", found.bound)


def fitting(found: Recommendation, hardware: Hardware) -> str:
    """How many layouts fit, and why others do not."""
    return (
        f"{found.fitting} layouts fit {limit(hardware) / 2**30:.1f} GiB ({USABLE:.0%} of an "
        f"NPU)" + (f"; not: {found.refused}." if str(found.refused) else ".")
    )


def _schedules(found: Recommendation) -> Iterator[str]:
    if len(found.schedules) < 2:
        return
    first, *others = found.schedules
    rest = ", ".join(
        f"{one.variant.name} {one.seconds / first.seconds - 1:+.1%}" for one in others[:3]
    )
    yield f"Schedules of the first layout: {first.variant.name}, then {rest}."
    yield ""


def reasons(found: Recommendation) -> Iterator[str]:
    """The recommendation in a line, then why, as a list in Markdown."""
    best = found.best
    low, typical, high = found.ratio
    yield f"Recommended: {_name(best)}, {_seconds(best.seconds)} a step."
    yield ""
    if found.runner_up is not None:
        yield f"- Runner-up: {_name(found.runner_up)}, {_against(found, found.runner_up)}."
    if best.layout.tp == 1:
        yield (
            "- TP 1 has no tensor-parallel transfers: there is nothing to fuse but context "
            "parallelism by Ulysses (--commfuse-ulysses) and data parallelism (--commfuse-dp)."
        )
    if not best.variant.ours and found.fused not in (None, found.runner_up):
        assert found.fused is not None
        yield f"- With CommFuse: {_name(found.fused)}, {_against(found, found.fused)}."
    if best.layout.tp > 1:
        yield (
            f"- Plain transfers take {typical:.0%} of the computing time of a layer (range "
            f"{low:.0%} .. {high:.0%}): {_what_that_means(typical)}"
        )
    if found.other != best:
        yield f"- Without CommFuse: {_name(found.other)}, {_against(found, found.other)}."
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in vars(best.memory).items())
    yield f"- Memory of the fullest NPU, GiB: {parts}."


def _what_that_means(ratio: float) -> str:
    if ratio <= 0.5:
        return "the own block's share of the work can hide the first transfers."
    if ratio <= 1:
        return "they fit behind the computation, but only in pieces."
    return "no order of transfers hides what is longer than the computation."


def _against(found: Recommendation, other: Candidate) -> str:
    change = other.seconds / found.best.seconds - 1
    said = f"{abs(change):.1%} {'longer' if change >= 0 else 'shorter'}"
    return f"{said} ({found.beats(other)} of {len(CORNERS)} machines of the ranges say longer)"


def _name(one: Candidate) -> str:
    tp, cp, dp, _, _ = one.layout
    again = ", full recomputation" if one.recompute == "full" else ""
    return f"TP {tp}, CP {cp}, PP {_pipeline(one)}, DP {dp}{again}, {one.variant.name}"


def _pipeline(one: Candidate) -> str:
    """Stages, and chunks of each where they are interleaved."""
    _, _, _, pp, vpp = one.layout
    return f"{pp} x {vpp}" if vpp > 1 else str(pp)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
