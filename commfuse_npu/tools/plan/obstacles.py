"""Why CommFuse cannot run in a launch, or in a layer of it, from the launch's options alone.

At its start the launch decides again, from Megatron's arguments and modules
(``mindspeed_patches``), and at run time the wrappers of Megatron's layers do, with the same tables
and reasons: :mod:`commfuse_npu.launch`.  The layers of a launch were read in Megatron-LM
core_v0.12.1, MindSpeed 26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is treated as
Megatron's GPTModel.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from commfuse_npu.launch.options import keeps_short_blocks, option_name
from commfuse_npu.launch.refusals import (
    BESIDE,
    EXPERTS,
    RECOMPUTED,
    REFUSALS_OF,
    UNSPLIT,
    layer_obstacle,
    missing,
)
from commfuse_npu.plan import min_rows_to_fuse
from commfuse_npu.plan.slots import paired_microbatches, slots
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.plan.asked_launch import AskedLaunch


class Obstacles(NamedTuple):
    """What prevents CommFuse in a launch; texts read ``option: why; way out``.

    Attributes:
        layers: each kind of linear layer, and its forward with ``--use-commfuse`` if nothing
            refuses the flag.
        fused: why ``--use-commfuse`` would be refused; empty if it would not.
        overlap: why ``--commfuse-overlap`` would be refused or would do nothing; empty if
            neither.
        own_schedule: why no forward can run beside the gradients of another micro-batch, whatever
            their number; empty if one can.
        paired: the smallest share of a stage's forwards for which there is a backward to run
            beside; ``None`` if there is nothing to pair or no schedule.
        least: layers with fewer rows per block stay Megatron's on a described NPU.
        notes: further facts for the reader.
        also: CommFuse's other options that could be given with ``--use-commfuse``.
    """

    layers: Sequence[Judged]
    fused: str
    overlap: str
    own_schedule: str
    paired: float | None
    least: int
    notes: Sequence[str]
    also: Sequence[str]


def obstacles(launch: AskedLaunch) -> Obstacles:
    """Judge a launch by its options.

    Raises:
        UsageError: an option has an invalid value.
    """
    options = launch.options
    config = launch.config
    fuse = launch.fuse
    problems = _refused("--use-commfuse", options)
    notes = list[str]()
    accepted = not problems
    also = list[str]()
    size = config.tensor_model_parallel_size
    if size == 1 and not (fuse.commfuse_ulysses or fuse.commfuse_dp):
        problems.append(
            "--tensor-model-parallel-size 1: a group of one transfers nothing; choose at least 2, "
            "or add --commfuse-dp, which needs none"
        )
    elif not (config.uses_sequence_parallel or fuse.commfuse_ulysses or fuse.commfuse_dp):
        problems.append(
            "without --sequence-parallel no layer would be fused: each keeps Megatron's own "
            "transfers; add it, or add --commfuse-dp, which does not need it"
        )
    for option, lacks, idle in _own_options(launch):
        against = [f"{option} with {text}" for text in _refused(option, options)]
        against += [lacks] if lacks else []
        if getattr(fuse, option.removeprefix("--").replace("-", "_")):
            problems += against
            notes += [f"{option} has no effect: {idle}"] if idle else []
        elif accepted and not against and not idle:
            also.append(option)
    if fuse.use_commfuse and not launch.command.registers:
        notes.append(
            "--use-commfuse is given to the script itself, which does not know it; start -m "
            "mindspeed_patches.launch SCRIPT, or call mindspeed_patches.install() after import "
            "torch in the script"
        )
    spec = options.text("--spec") or ""
    if "mamba" in spec or (spec and not spec.startswith("mindspeed_llm.")):
        notes.append(f"--spec {spec} is not read: it is judged as Megatron's GPTModel")
    least = min_rows_to_fuse(size, config.hidden_size) if keeps_short_blocks(fuse) else 0
    layers = list(_judge(launch, least))
    return Obstacles(layers, "; ".join(problems), *_overlap(launch), least, notes, also)


def _refused(ours: str, options: Options) -> list[str]:
    """The options that exclude one of CommFuse's."""
    reasons = []
    for refusal in REFUSALS_OF[ours]:
        option = refusal.option.split()[0]
        given = " ".join([option, *options.values(option)])
        if option not in options and refusal.default is not None:
            given = f"{option} {refusal.default}, Megatron's default"
        elif option not in options or not refusal.applies(options.text(option) or True):
            continue
        reasons.append(f"{given}: {refusal.why}; {refusal.way_out}")
    return reasons


def _own_options(launch: AskedLaunch) -> Iterator[tuple[str, str, str]]:
    """Options that need ``--use-commfuse``: what the launch lacks, and why they do nothing."""
    options = launch.options
    config = launch.config
    sharded = "--use-distributed-optimizer" in options
    args = argparse.Namespace(**vars(config), use_distributed_optimizer=sharded)
    attention = "--commfuse-attention"
    ulysses = "--commfuse-ulysses"
    dp = "--commfuse-dp"
    no_proj = f"{attention}: proj is not among --commfuse-layers; add it, or leave {attention} out"
    lacks = "" if "proj" in launch.fuse.commfuse_layers else no_proj
    # MindSpeed recomputes attention separately, whatever --recompute-modules lists.
    selective = options.text("--recompute-granularity") == "selective"
    idle = "" if config.uses_sequence_parallel else UNSPLIT
    if selective or "--recompute-activations" in options:
        idle = RECOMPUTED
    yield attention, lacks or missing(attention, args), idle
    yield ulysses, missing(ulysses, args), ""
    alone = config.data_parallel_size == 1 == config.context_parallel_size
    yield dp, missing(dp, args), "DP 1 transfers nothing" if alone else ""


def _overlap(launch: AskedLaunch) -> tuple[str, str, float | None]:
    options = launch.options
    config = launch.config
    sizes = config.tensor_model_parallel_size, config.context_parallel_size
    if max(*sizes, launch.expert_parallel) == 1:
        return "no tensor, expert or context parallelism, so nothing to hide", "", None
    refused = "; ".join(_refused("--commfuse-overlap", options))
    schedules = "; ".join(reason.partition(";")[0] for reason in _refused(BESIDE, options))
    return refused, schedules, _paired(launch)


def _paired(launch: AskedLaunch) -> float | None:
    config = launch.config
    stages = config.pipeline_model_parallel_size
    chunks = launch.chunks
    if chunks > 1 and config.micro_batches % stages:
        return None
    # The first stage has the most forwards before its first backward.
    paired, forwards = paired_microbatches(slots(stages, 0, chunks, config.micro_batches))
    return paired / max(1, forwards)


# ------------------------------------------------------------------ linear layers


class Judged(NamedTuple):
    """A kind of linear layer, and why its forward is Megatron's own; no reason: it is fused."""

    layer: str
    reason: str

    def __str__(self) -> str:
        own = f"Megatron's own forward, because {self.reason}"
        return f"{self.layer}: {own if self.reason else 'fused'}"


_Layer = tuple[str, str, str]
"""A kind of layer: its name, its name in ``--commfuse-layers``, and why it keeps its own forward,
or empty."""
_ROW_PARALLEL = ("proj", "fc2", "shared_fc2")
"""Those in ``--commfuse-layers``; the others are column-parallel."""


def _layers(options: Options) -> Iterator[_Layer]:
    """The kinds of linear layers of a launch."""
    spec = options.text("--spec") or ""
    compressed, longcat = (name in spec for name in ("deepseek4_spec", "longcat_spec"))
    latent = "--multi-latent-attention" in options and not compressed
    # Qwen3-Next: every n-th layer has attention with separate q, k and v; others are linear.
    delta_net = "--full-attention-interval" in options
    if not (latent or compressed or delta_net):
        yield "qkv", "qkv", ""
    if latent:
        yield "q_up", "q_up", ""
        yield "kv_up", "kv_up", ""
    if delta_net:
        yield "q, k, v apart", "qkv", ""
        yield "delta-net in", "fc1", ""
        yield "delta-net out", "fc2", ""
    if compressed:
        unknown = "it is not among the layers that can be fused"
        yield "CSA's q_up, o_down", "", unknown
        yield "CSA's o_up", "", unknown
    else:
        yield "proj", "proj", ""
    experts = options.number("--num-experts", 0) > 0
    # With experts, only the first layers are dense (MindSpeed-LLM's transformer_block.py).
    if not experts or longcat or options.number("--first-k-dense-replace", -1) > 0:
        yield "fc1", "fc1", ""
        yield "fc2", "fc2", ""
    shared = "--n-shared-experts", "--moe-shared-expert-intermediate-size"
    if experts and any(options.number(name, 0) for name in shared):
        for name in ("shared_fc1", "shared_fc2"):
            yield name, name, _overlapped(options)
    if experts:
        yield "experts", "fc2", EXPERTS
    if "--mtp-num-layers" in options:
        yield "eh_proj", "eh_proj", ""
    yield "output", "output", ""


def _judge(launch: AskedLaunch, least: int) -> Iterator[Judged]:
    """The verdict on each linear layer; ``least`` rows are fused."""
    options = launch.options
    for name, known_as, kept in _layers(options):
        reason = kept or layer_obstacle(
            known_as,
            column=known_as not in _ROW_PARALLEL,
            split=launch.config.uses_sequence_parallel,
            size=launch.config.tensor_model_parallel_size,
            layers=launch.fuse.commfuse_layers,
            given=lambda attribute: option_name(attribute) in options,
            rows=launch.config.block_rows,
            least=least,
        )
        yield Judged(name, reason or "")


def _overlapped(options: Options) -> str:
    """Why shared experts use MindSpeed's linear layers, or ones without transfers; else empty."""
    for name in ("alltoall-overlap-comm", "allgather-overlap-comm", "shared-expert-overlap"):
        if f"--moe-{name}" in options:
            return f"--moe-{name} runs them beside the experts' transfers"
    return ""
