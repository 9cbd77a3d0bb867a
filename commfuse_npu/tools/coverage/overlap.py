"""Whether forward-backward overlap would hide the transfers of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.tools.launch_script.launch import Launch
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.refusals import FB_OVERLAP_REFUSALS

__all__ = ["Overlapped", "judge_overlap"]

_OTHERS = {
    "--use-ascend-coc": "its transfers are inside of CoC's operators",
    "--use-ascend-mc2": "its transfers are inside of MC2's kernels",
    "--moe-fb-overlap": "it overlaps the same forwards and backwards",
}
"""Flags of another overlap, and why a transfer is not ours to hide beside them."""


@dataclass(frozen=True)
class Overlapped:
    """What ``--commfuse-fb-overlap`` would do in a launch.

    Attributes:
        transfers: whether it has any of tensor, expert or context parallelism.
        obstacle: why it would not run, or pair less than half of the micro-batches of a stage;
            empty if it does.
        without: the same without the flags of another overlap.
        paired: the least share of a stage's forwards that run beside a backward, of a launch that
            says how many micro-batches it has.
    """

    transfers: bool
    obstacle: str
    without: str
    paired: float | None


def judge_overlap(launch: Launch, data: int | None, exchanging: bool) -> Overlapped:
    """Judge a launch.

    Args:
        data: replicas; ``None`` if the launch does not say.
        exchanging: whether tensor, expert or context parallelism has more than one rank.
    """
    options = launch.options
    if not exchanging:
        nothing = "no tensor, expert or context parallelism, so nothing to hide"
        return Overlapped(False, nothing, nothing, None)
    paired, unpaired = _paired(options, data)
    refused = {
        refusal.option: f"{refusal.option}: {refusal.why}"
        for refusal in FB_OVERLAP_REFUSALS
        if refusal.value_in(options.words) is not None and refusal.option not in _OTHERS
    }
    without = next(iter(refused.values()), unpaired)
    others = (f"{name}: {why}" for name, why in _OTHERS.items() if name in options)
    return Overlapped(True, next(others, without), without, paired)


def _paired(options: Options, data: int | None) -> tuple[float | None, str]:
    """The least share of forwards that have a partner, and why that is too little."""
    if data is None:
        return None, "it does not say how many processes it has"
    stages = options.number("--pipeline-model-parallel-size", 1)
    micro = options.number("--micro-batch-size", 1)
    batches = options.number("--global-batch-size", micro * data) // (micro * data)
    chunks = _chunks(options, stages)
    if batches * chunks < 2:
        return 0.0, "one micro-batch has no partner"
    if chunks > 1 and batches % stages:
        return None, f"{batches} micro-batches are no multiple of {stages} stages"
    shares = []
    for stage in range(stages):
        paired, every = paired_microbatches(slots(stages, stage, chunks, batches))
        shares.append(paired / every)
    least = min(shares)
    if least < 0.5:
        return least, f"{batches} micro-batches: {least:.0%} of a stage's have a partner"
    return least, ""


def _chunks(options: Options, stages: int) -> int:
    """Model chunks per stage."""
    virtual = options.number("--num-virtual-stages-per-pipeline-rank", 0)
    each = options.number("--num-layers-per-virtual-pipeline-stage", 0)
    if virtual or not each:
        return max(1, virtual)
    return max(1, options.number("--num-layers", 0) // (stages * each))
