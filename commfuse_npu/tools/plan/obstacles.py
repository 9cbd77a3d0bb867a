"""Why CommFuse cannot run in a launch, decided from its options alone; no other tool does this.

At its start the launch decides again, from Megatron's arguments and modules
(``mindspeed_patches``), with the same tables: :mod:`commfuse_npu.refusals` and
:mod:`commfuse_npu.options`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commfuse_npu.options import keeps_short_blocks
from commfuse_npu.plan import min_rows_to_fuse
from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.refusals import REFUSALS_OF, missing
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.linear_layers import Judged, attention_obstacle, judge, size_of
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.launch import AskedLaunch

__all__ = ["INSIDE_KERNELS", "Obstacles", "model_chunks", "obstacles"]

INSIDE_KERNELS = {
    "--use-ascend-coc": "its transfers are inside of CoC's operators",
    "--use-ascend-mc2": "its transfers are inside of MC2's kernels",
}
"""Flags of other overlaps, which leave nothing for forward-backward overlap."""


class Obstacles(NamedTuple):
    """What prevents CommFuse in a launch; texts read ``option: why; way out``.

    Attributes:
        layers: each kind of linear layer, and its forward with ``--use-commfuse`` if nothing
            refuses the flag.
        fused: why ``--use-commfuse`` would be refused; empty if it would not.
        overlap: why ``--commfuse-fb-overlap`` would be refused, would do nothing, or would pair
            less than half of a stage's micro-batches; empty if none of these.
        paired: the smallest share of a stage's forwards that run beside a backward; ``None`` if
            there is nothing to pair or no schedule.
        least: layers with fewer rows per block stay Megatron's on a described NPU.
        notes: further facts for the reader.
    """

    layers: Sequence[Judged]
    fused: str
    overlap: str
    paired: float | None
    least: int
    notes: Sequence[str]


def obstacles(launch: AskedLaunch) -> Obstacles:
    """Judge a launch by its options.

    Raises:
        UsageError: an option has an invalid value.
    """
    options, config, fuse = launch.options, launch.config, launch.fuse
    refused = {ours: list(_refused(ours, options)) for ours in REFUSALS_OF}
    problems, notes = list(refused["--use-commfuse"]), list[str]()
    accepted, also = not problems, list[str]()
    size, rows = config.tensor_model_parallel_size, config.block_rows
    if size == 1 and not (fuse.commfuse_ulysses or fuse.commfuse_dp):
        problems.append(
            "--tensor-model-parallel-size 1: a group of one transfers nothing; choose at least 2, "
            "or add --commfuse-dp, which needs none"
        )
    for option, lacks, idle in _own_options(launch):
        against = [f"{option} with {text}" for text in refused[option]]
        against += [lacks] if lacks else []
        if not getattr(fuse, option.removeprefix("--").replace("-", "_")):
            also += [option] * (accepted and not against and not idle)
            continue
        problems += against
        if idle:
            notes.append(f"{option} has no effect: {idle}")
    layers = list(judge(options, fuse.commfuse_layers, fuse.commfuse_attention))
    limited = keeps_short_blocks(fuse)
    least = min_rows_to_fuse(size, config.hidden_size) if limited else 0
    if size > 1 and rows < least:
        notes.append(
            f"its blocks have {rows} rows, and with fewer than {least} Megatron's own order is "
            "faster (simulated): on an NPU with a hardware description the layers keep it, unless "
            "--commfuse-chunks 1 is given"
        )
        short = f"a block has fewer than {least} rows"
        layers = [Judged(layer, reason or short, "") for layer, reason, _ in layers]
    if size > 1 and not config.uses_sequence_parallel:
        notes.append(
            "without --sequence-parallel column-parallel layers keep Megatron's forward; add it"
        )
    if fuse.use_commfuse and not launch.command.registers:
        notes.append(
            "--use-commfuse is given to the script itself, which does not know it; start -m "
            "mindspeed_patches.launch SCRIPT, or call mindspeed_patches.install() after import "
            "torch in the script"
        )
    spec = options.text("--spec") or ""
    if spec and not spec.startswith("mindspeed_llm."):
        notes.append(f"--spec {spec} is not read: it is judged as Megatron's GPTModel")
    notes += [f"with --use-commfuse {', '.join(also)} can be given, too" for _ in also[:1]]
    overlap, paired = _overlap(launch, refused["--commfuse-fb-overlap"])
    return Obstacles(layers, "; ".join(problems), overlap, paired, least, notes)


def _refused(ours: str, options: Options) -> Iterator[str]:
    """The options that exclude one of CommFuse's."""
    for refusal in REFUSALS_OF[ours]:
        option = refusal.option.split()[0]
        given = " ".join([option, *options.values(option)])
        if option not in options and refusal.default is not None:
            given = f"{option} {refusal.default}, Megatron's default"
        elif option not in options or not refusal.applies(options.text(option) or True):
            continue
        yield f"{given}: {refusal.why}; {refusal.way_out}"


def _own_options(launch: AskedLaunch) -> Iterator[tuple[str, str, str]]:
    """Options that need ``--use-commfuse``: what the launch lacks, and why they do nothing."""
    options, config = launch.options, launch.config
    sharded = "--use-distributed-optimizer" in options
    args = argparse.Namespace(**vars(config), use_distributed_optimizer=sharded)
    attention, ulysses, dp = "--commfuse-attention", "--commfuse-ulysses", "--commfuse-dp"
    no_proj = f"{attention}: proj is not among --commfuse-layers; add it, or leave {attention} out"
    lacks = "" if "proj" in launch.fuse.commfuse_layers else no_proj
    yield attention, lacks or missing(attention, args), attention_obstacle(options)
    yield ulysses, missing(ulysses, args), ""
    alone = config.data_parallel_size == 1 == config.context_parallel_size
    yield dp, missing(dp, args), "DP 1 transfers nothing" if alone else ""


def _overlap(launch: AskedLaunch, refused: Sequence[str]) -> tuple[str, float | None]:
    options, config = launch.options, launch.config
    sizes = config.tensor_model_parallel_size, config.context_parallel_size
    if max(*sizes, size_of(options, "expert-model")) == 1:
        return "no tensor, expert or context parallelism, so nothing to hide", None
    paired, unpaired = _paired(options, config)
    inside = [
        f"{name}: {why}; leave it out" for name, why in INSIDE_KERNELS.items() if name in options
    ]
    return "; ".join([*inside, *refused]) or unpaired, paired


def model_chunks(options: Options, stages: int) -> int:
    """Model chunks per pipeline stage; 1 without a virtual pipeline."""
    chunks = options.number("--num-virtual-stages-per-pipeline-rank", 0)
    each = options.number("--num-layers-per-virtual-pipeline-stage", 0)
    if each and not chunks:
        layers = options.number("--num-layers", 0)
        chunks, remainder = divmod(layers, stages * each)
        if remainder:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {each}: {layers} layers are not "
                f"divisible by it times {stages} stages; choose another"
            )
    return max(1, chunks)


def _paired(options: Options, config: ModelConfig) -> tuple[float | None, str]:
    """The smallest share of forwards that have a partner, and why it is too small, or empty."""
    stages = config.pipeline_model_parallel_size
    # Without a replica the layout does not fit, which is reported by itself.
    replicas = max(1, config.data_parallel_size)
    batches = config.global_batch_size // (config.micro_batch_size * replicas)
    chunks = model_chunks(options, stages)
    if batches * chunks < 2:
        return 0.0, "one micro-batch has no partner"
    if chunks > 1 and batches % stages:
        return None, f"{batches} micro-batches are no multiple of {stages} stages"
    pairs = [paired_microbatches(slots(stages, s, chunks, batches)) for s in range(stages)]
    least = min(paired / total for paired, total in pairs)
    reason = f"{batches} micro-batches: {least:.0%} of a stage's have a partner"
    return least, reason if least < 0.5 else ""
