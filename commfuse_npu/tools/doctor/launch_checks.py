"""Whether the layout of a launch fits, and whether CommFuse would take part in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from commfuse_npu.plan import least_rows
from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.fuse_options import min_rows_of
from commfuse_npu.tools.doctor.launch import ASSUMED_VOCABULARY, Launch
from commfuse_npu.tools.launch_script.options import value_of
from commfuse_npu.tools.linear_layers import attention_obstacle, recomputes_attention
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.refusals import (
    ATTENTION_REFUSALS,
    DATA_PARALLEL_REFUSALS,
    FLOW_REFUSALS,
    REFUSALS,
    ULYSSES_REFUSALS,
    Refusal,
    data_parallel_obstacle,
    flow_obstacle,
    ulysses_obstacle,
)

__all__ = ["check_launch"]

_about = partial(Finding, "launch")


def check_launch(launch: Launch) -> Iterator[Finding]:
    """Whether the layout fits, and whether CommFuse would take part."""
    yield from _check_layout(launch.config)
    if not launch.knows_vocabulary:
        yield _about(
            "--vocab-size",
            "note",
            f"not given; {ASSUMED_VOCABULARY} is assumed, for the shapes of the output layer",
            action="tokenizers are not read here: add --vocab-size to see its shapes",
        )
    if not launch.fuse.use_commfuse:
        yield _about(
            "--use-commfuse",
            "warning",
            "not given",
            "the flag: without it nothing is fused",
            "add --use-commfuse; what is listed below is what it would do",
        )
        return
    if not launch.registers:
        yield _about(
            "--use-commfuse",
            "warning",
            "given to pretrain_gpt.py itself",
            "the launcher before it: MindSpeed-LLM does not know the flag by itself",
            "start -m mindspeed_patches.launch pretrain_gpt.py, or call "
            "mindspeed_patches.install() after import torch in the script",
        )
    yield from _check_options(launch)


def _check_layout(config: ModelConfig) -> Iterator[Finding]:
    try:
        config.validate()
    except ConfigError as error:
        for problem in str(error).splitlines():
            yield _about("layout", "error", problem, "", "the training would end at its start")
    else:
        yield _about(
            "layout",
            "ok",
            f"{config.world_size} NPUs = TP {config.tensor_model_parallel_size} x PP "
            f"{config.pipeline_model_parallel_size} x CP {config.context_parallel_size} x DP "
            f"{config.data_parallel_size}",
        )


def _check_options(launch: Launch) -> Iterator[Finding]:
    config, fuse = launch.config, launch.fuse
    elsewhere = (fuse.ulysses or fuse.dp) and not fuse.attention
    if config.tensor_model_parallel_size == 1 and not elsewhere:
        allowed = not fuse.attention and value_of(launch.options, "--commfuse-allow-nothing")
        yield _about(
            "--tensor-model-parallel-size",
            "error" if allowed in (None, False) else "warning",
            "1",
            "at least 2: a group of one transfers nothing, and --use-commfuse is refused unless "
            "--commfuse-allow-nothing is given",
            "choose TP of at least 2, add --commfuse-dp, which needs none, or leave "
            "--use-commfuse out",
        )
    yield from _check_refused(launch, REFUSALS)
    if fuse.attention:
        yield from _check_refused(launch, ATTENTION_REFUSALS)
        yield _check_attention(launch)
    if fuse.flow is not None:
        yield from _check_refused(launch, FLOW_REFUSALS)
        yield _check_flow(config, fuse.flow)
    if fuse.ulysses:
        yield from _check_refused(launch, ULYSSES_REFUSALS)
        yield _check_ulysses(config)
    if fuse.dp:
        yield from _check_refused(launch, DATA_PARALLEL_REFUSALS)
        yield _check_data_parallel(launch)
    if config.tensor_model_parallel_size > 1 and not config.uses_sequence_parallel:
        yield _about(
            "--sequence-parallel",
            "warning",
            "not given",
            "the flag: without, column-parallel layers keep Megatron's forward",
            "add --sequence-parallel",
        )
    elif config.tensor_model_parallel_size > 1:
        yield from _check_rows(launch)


def _obstacle(option: str, given: str, why: str) -> Finding:
    """What the feature would end with, which begins with the option and ends with a way out."""
    needs, _, way_out = why.removeprefix(option).lstrip(": ").partition("; ")
    return _about(option, "error", given, needs, way_out)


def _check_flow(config: ModelConfig, chunks: int) -> Finding:
    size, length = config.tensor_model_parallel_size, config.seq_length
    why = flow_obstacle(chunks, size, config.uses_sequence_parallel, length)
    if why:
        return _obstacle("--commfuse-flow", str(chunks), why)
    return _about(
        "--commfuse-flow",
        "note",
        str(chunks),
        "chunks that flow through whole layers",
        "layers hide their transfers behind each other; weight gradients are summed chunk by chunk",
    )


def _check_rows(launch: Launch) -> Iterator[Finding]:
    """Where blocks are too short to be fused, or so short that it does not pay."""
    config, fuse = launch.config, launch.fuse
    sizes = config.tensor_model_parallel_size, config.hidden_size
    rows, least, limit = config.block_rows, least_rows(*sizes), min_rows_of(*sizes, fuse)
    about = partial(_about, "rows of a block", "warning", f"{rows} (tokens of a micro-batch / TP)")
    if rows < limit:
        why = ", whose own order is faster then (simulated)" if fuse.min_rows == "auto" else ""
        yield about(
            f"{limit} at least: with fewer layers stay Megatron's{why}",
            "fewer TP, longer sequences, or --commfuse-min-rows 0, which fuses them anyway",
        )
    elif rows < least:
        yield about(
            f"{least} at least: with fewer Megatron's own order is faster (simulated)",
            "fewer TP, longer sequences, or --commfuse-min-rows "
            f"{least}, which leaves such layers to Megatron",
        )


def _check_refused(launch: Launch, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    for refusal in refusals:
        value = refusal.value_in(launch.options)
        if value is not None:
            yield _about(
                refusal.option.split()[0],
                "error",
                value,
                f"not together with {refusal.ours}, which is refused then: {refusal.why}",
                refusal.way_out,
            )


def _check_attention(launch: Launch) -> Finding:
    about = partial(_about, "--commfuse-attention")
    layers, obstacle = launch.fuse.layers, attention_obstacle(launch.options)
    if "proj" not in layers:
        return about(
            "error",
            f"given, with --commfuse-layers {','.join(layers)}",
            "proj among the layers: attention is fused with the output projection",
            "add proj to --commfuse-layers",
        )
    if obstacle:
        return about(
            "warning",
            f"given, but {obstacle}",
            "attention that can wait for its projection",
            "leave --recompute-activations and --recompute-granularity selective out"
            if recomputes_attention(launch.options)
            else "add --sequence-parallel",
        )
    return about(
        "note",
        "given",
        action="calls with packed sequences, a bias or a mask that is not causal keep "
        "Megatron's attention",
    )


def _check_ulysses(config: ModelConfig) -> Finding:
    about = partial(_about, "--commfuse-ulysses")
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    # Whether heads and sequence can be shared out is checked with the layout, for every launch.
    why = ulysses_obstacle(cp, tp, config.context_parallel_algo, None, None)
    if why:
        return _obstacle("--commfuse-ulysses", f"given, CP {cp}", why)
    hides = "all-to-alls hide behind attention and its projections"
    if tp > 1:
        hides = (
            "the output's all-to-all hides behind attention, that of q, k and v does not: at TP "
            f"{tp} the weights of the projections are not whole"
        )
    elif config.num_query_groups % cp:
        hides = (
            "the output's all-to-all hides behind attention and its projection, that of q, k and v "
            f"does not: {config.num_query_groups} query groups are not divisible by CP {cp}"
        )
    return about(
        "note",
        f"given, CP {cp}",
        action=f"{hides}; calls with packed sequences, a bias or a mask that is not causal keep "
        "their own",
    )


def _check_data_parallel(launch: Launch) -> Finding:
    about = partial(_about, "--commfuse-dp")
    replicas = launch.config.data_parallel_size * launch.config.context_parallel_size
    sharded = value_of(launch.options, "--use-distributed-optimizer") is not None
    if why := data_parallel_obstacle(sharded):
        return _obstacle("--commfuse-dp", "given", why)
    if replicas == 1:
        return about(
            "warning",
            "given, with DP 1",
            "at least 2: a data-parallel group of one transfers nothing",
            "leave --commfuse-dp out, or choose a smaller TP or PP",
        )
    return about(
        "note",
        f"given, {replicas} ranks share a copy of the optimizer's state",
        action="parameters of experts keep Megatron's collectives",
    )
