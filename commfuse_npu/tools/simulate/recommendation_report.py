"""A recommendation as text: the layouts, the reasons, and the launch options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.footprint import USABLE, limit
from commfuse_npu.tools.simulate.launch_options import options
from commfuse_npu.tools.simulate.recommend import Candidate, Recommendation
from commfuse_npu.tools.simulate.report import seconds
from commfuse_npu.tools.simulate.sweep import CORNERS

__all__ = ["COLUMNS", "as_json", "fitting", "layouts", "reasons", "report"]

COLUMNS = (
    *("place", "TP", "CP", "PP", "DP", "recompute", "schedule", "step", "tokens/s/NPU", "MFU"),
    "memory of an NPU",
)


def report(found: Recommendation, model: ModelConfig, path: Path, hardware: Hardware) -> str:
    """Launch options and tables, in Markdown.

    Args:
        path: file of the model's description.
    """
    training = found.best.training
    lines = [
        "",
        "Options of pretrain_gpt.py:",
        "",
        f"    {' '.join(options(model, found.best))}",
        "",
        f"{path.stem}, {training.model.seq_length} tokens, {training.layout.npus} NPUs of "
        f"{hardware.name}. Simulated, not measured: {hardware.assumed} of {hardware.path.name} are "
        "assumed.",
        "",
        table_row(COLUMNS),
        "|---|---:|---:|---:|---:|---|---|---:|---:|---:|---:|",
        *(table_row(cells) for _, cells in layouts(found, hardware)),
        "",
        fitting(found, hardware),
        "",
    ]
    return "\n".join(lines)


def as_json(found: Recommendation, model: ModelConfig) -> dict[str, Any]:
    """The recommendation and all candidates that were kept, shortest step first."""

    def plain(one: Candidate) -> dict[str, Any]:
        return {
            "layout": one.training.layout._asdict(),
            "variant": one.variant.name,
            "recompute": one.training.recompute,
            "step_seconds": one.seconds,
            "step_seconds_on_all_machines": found.steps.get(one),
            "memory_bytes": one.memory.total,
            "options": options(model, one),
        }

    return {
        "simulated": True,
        "recommended": plain(found.best),
        "layouts": [plain(plan) for plan in found.ranked],
        "schedules": [plain(plan) for plan in found.schedules],
        "without_commfuse": [plain(plan) for plan in found.rivals],
        "bound": found.bound and plain(found.bound) | {"options": None},
        "communication_per_computation": found.ratio._asdict(),
        "refused": found.refused,
    }


def layouts(
    found: Recommendation, hardware: Hardware
) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
    """Each candidate, and its row of cells under :data:`COLUMNS`."""
    peak = hardware.typical("npu.cube_flops")
    places = [
        *((str(place), plan) for place, plan in enumerate(found.ranked, 1)),
        *(("without CommFuse", plan) for plan in found.rivals),
        *(("bound, cannot be launched", plan) for plan in [found.bound] if plan is not None),
    ]
    for place, plan in places:
        training, (tp, cp, dp, _, _) = plan.training, plan.training.layout
        mark = "**" if plan is found.best else ""
        cells = (
            *(place, str(tp), str(cp), _pipeline(plan), str(dp), training.recompute),
            *(f"{mark}{plan.variant.name}{mark}", seconds(plan.seconds)),
            f"{training.tokens_per_second(plan.seconds):.0f}",
            f"{training.utilization(plan.seconds, peak):.1%}",
            f"{plan.memory.total / 2**30:.1f} GiB",
        )
        yield plan, cells


def fitting(found: Recommendation, hardware: Hardware) -> str:
    """Number of layouts that fit, and why others do not."""
    refused = "; ".join(f"{count} x {reason}" for reason, count in found.refused.items())
    return (
        f"{found.fitting} layouts fit {limit(hardware) / 2**30:.1f} GiB ({USABLE:.0%} of an NPU)"
        + (f"; not: {refused}." if refused else ".")
    )


def reasons(found: Recommendation) -> Iterator[str]:
    """The recommendation in one line, then the reasons, as a Markdown list."""
    best, tp = found.best, found.best.training.layout.tp

    def against(other: Candidate) -> str:
        change = other.seconds / best.seconds - 1
        return (
            f"{_name(other)}, {abs(change):.1%} {'longer' if change >= 0 else 'shorter'} "
            f"({found.beats(other)} of {len(CORNERS)} simulated machines say longer)."
        )

    yield f"Recommended: {_name(best)}, {seconds(best.seconds)} a step."
    yield ""
    first, *slower = found.schedules
    if slower:
        later = (
            f"{plan.variant.name} {plan.seconds / first.seconds - 1:+.1%}" for plan in slower[:3]
        )
        names = f"{first.variant.name}, then {', '.join(later)}"
        yield f"- Schedules of the first layout: {names}."
    if found.runner_up is not None:
        yield f"- Runner-up: {against(found.runner_up)}"
    if not best.variant.ours and found.fused not in (None, found.runner_up):
        assert found.fused is not None
        yield f"- With CommFuse: {against(found.fused)}"
    if tp == 1:
        yield (
            "- TP 1 has no tensor-parallel transfers: there is nothing to fuse but context "
            "parallelism by Ulysses (--commfuse-ulysses) and data parallelism (--commfuse-dp)."
        )
    else:
        low, typical, high = found.ratio
        means = "they take longer than the computation, so that some stay exposed."
        if typical <= 0.5:
            means = "the own block's share of the work can hide the first transfers."
        elif typical <= 1:
            means = "they fit behind the computation, but only in pieces."
        yield (
            f"- Plain transfers take {typical:.0%} of the computing time of a layer (range "
            f"{low:.0%} .. {high:.0%}): {means}"
        )
    if found.other != best:
        yield f"- Without CommFuse: {against(found.other)}"
    sizes = best.memory._asdict().items()
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes)
    yield f"- Memory of the fullest NPU, GiB: {parts}."


def _name(one: Candidate) -> str:
    tp, cp, dp, _, _ = one.training.layout
    again = ", full recomputation" if one.training.again else ""
    return f"TP {tp}, CP {cp}, PP {_pipeline(one)}, DP {dp}{again}, {one.variant.name}"


def _pipeline(one: Candidate) -> str:
    """Number of stages, and of chunks per stage if they are interleaved."""
    _, _, _, pp, vpp = one.training.layout
    return f"{pp} x {vpp}" if vpp > 1 else str(pp)
