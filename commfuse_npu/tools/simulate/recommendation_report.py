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

__all__ = ["as_json", "reasons", "report"]

_COLUMNS = (
    *("place", "TP", "CP", "PP", "DP", "recompute", "schedule", "step", "tokens/s/NPU"),
    "memory of an NPU",
)


def report(
    recommendation: Recommendation, model: ModelConfig, path: Path, hardware: Hardware
) -> str:
    """Launch options and tables, in Markdown.

    Args:
        path: file of the model's description.
    """
    training = recommendation.best.training
    lines = [
        "",
        "Options of pretrain_gpt.py:",
        "",
        f"    {' '.join(options(model, recommendation.best))}",
        "",
        f"{path.stem}, {training.model.seq_length} tokens, {training.layout.npus} NPUs of "
        f"{hardware.name}. Simulated, not measured: {hardware.assumed} of {hardware.path.name} are "
        "assumed.",
        "",
        table_row(_COLUMNS),
        "|---|---:|---:|---:|---:|---|---|---:|---:|---:|",
        *map(table_row, _layouts(recommendation)),
        "",
        _fitting(recommendation, hardware),
        "",
    ]
    return "\n".join(lines)


def as_json(recommendation: Recommendation, model: ModelConfig) -> dict[str, Any]:
    """The recommendation and all candidates that were kept, shortest step first."""

    def plain(candidate: Candidate) -> dict[str, Any]:
        return {
            "layout": candidate.training.layout._asdict(),
            "variant": candidate.variant.name,
            "recompute": candidate.training.recompute,
            "step_seconds": candidate.seconds,
            "step_seconds_on_all_machines": recommendation.steps.get(candidate),
            "memory_bytes": candidate.memory.total,
            "options": options(model, candidate),
        }

    return {
        "simulated": True,
        "recommended": plain(recommendation.best),
        "layouts": [plain(plan) for plan in recommendation.ranked],
        "schedules": [plain(plan) for plan in recommendation.schedules],
        "without_commfuse": [plain(plan) for plan in recommendation.rivals],
        "communication_per_computation": recommendation.ratio._asdict(),
        "refused": recommendation.refused,
    }


def _layouts(recommendation: Recommendation) -> Iterator[tuple[str, ...]]:
    """A row of cells under :data:`_COLUMNS` for each candidate."""
    places = [
        *((str(place), plan) for place, plan in enumerate(recommendation.ranked, 1)),
        *(("without CommFuse", plan) for plan in recommendation.rivals),
    ]
    for place, plan in places:
        training, (tp, cp, dp, _, _) = plan.training, plan.training.layout
        mark = "**" if plan is recommendation.best else ""
        yield (
            *(place, str(tp), str(cp), _pipeline(plan), str(dp), training.recompute),
            *(f"{mark}{plan.variant.name}{mark}", seconds(plan.seconds)),
            f"{training.tokens_per_second(plan.seconds):.0f}",
            f"{plan.memory.total / 2**30:.1f} GiB",
        )


def _fitting(recommendation: Recommendation, hardware: Hardware) -> str:
    """Number of layouts that fit, and why others do not."""
    refused = "; ".join(f"{count} x {reason}" for reason, count in recommendation.refused.items())
    return (
        f"{recommendation.fitting} layouts fit {limit(hardware) / 2**30:.1f} GiB "
        f"({USABLE:.0%} of an NPU)" + (f"; not: {refused}." if refused else ".")
    )


def reasons(recommendation: Recommendation) -> Iterator[str]:
    """The recommendation in one line, then the reasons, as a Markdown list."""
    best, tp = recommendation.best, recommendation.best.training.layout.tp

    def against(other: Candidate) -> str:
        change = other.seconds / best.seconds - 1
        return (
            f"{_name(other)}, {abs(change):.1%} {'longer' if change >= 0 else 'shorter'} "
            f"({recommendation.beats(other)} of {len(CORNERS)} simulated machines say longer)."
        )

    yield f"Recommended: {_name(best)}, {seconds(best.seconds)} a step."
    yield ""
    first, *slower = recommendation.schedules
    if slower:
        later = (
            f"{plan.variant.name} {plan.seconds / first.seconds - 1:+.1%}" for plan in slower[:3]
        )
        names = f"{first.variant.name}, then {', '.join(later)}"
        yield f"- Schedules of the first layout: {names}."
    if recommendation.runner_up is not None:
        yield f"- Runner-up: {against(recommendation.runner_up)}"
    if not best.variant.ours and recommendation.fused not in (None, recommendation.runner_up):
        assert recommendation.fused is not None
        yield f"- With CommFuse: {against(recommendation.fused)}"
    if tp == 1:
        yield (
            "- TP 1 has no tensor-parallel transfers: there is nothing to fuse but context "
            "parallelism by Ulysses (--commfuse-ulysses) and data parallelism (--commfuse-dp)."
        )
    else:
        low, typical, high = recommendation.ratio
        means = "they take longer than the computation, so that some stay exposed."
        if typical <= 0.5:
            means = "the own block's share of the work can hide the first transfers."
        elif typical <= 1:
            means = "they fit behind the computation, but only in pieces."
        yield (
            f"- Plain transfers take {typical:.0%} of the computing time of a layer (range "
            f"{low:.0%} .. {high:.0%}): {means}"
        )
    if recommendation.other != best:
        yield f"- Without CommFuse: {against(recommendation.other)}"
    sizes = best.memory._asdict().items()
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes)
    yield f"- Memory of the fullest NPU, GiB: {parts}."


def _name(candidate: Candidate) -> str:
    tp, cp, dp, _, _ = candidate.training.layout
    recomputation = ", full recomputation" if candidate.training.recomputes else ""
    sizes = f"TP {tp}, CP {cp}, PP {_pipeline(candidate)}, DP {dp}"
    return f"{sizes}{recomputation}, {candidate.variant.name}"


def _pipeline(candidate: Candidate) -> str:
    """Number of stages, and of chunks per stage if they are interleaved."""
    _, _, _, pp, vpp = candidate.training.layout
    return f"{pp} x {vpp}" if vpp > 1 else str(pp)
