"""Mismatches between a model, its parallel layout and its batch, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["indivisible", "problems"]

_MOST_TP = 4096
"""Largest TP that is suggested."""


def problems(config: ModelConfig) -> Iterator[str]:
    """All mismatches, each with the value, the limit and the remedy."""
    yield from _model_problems(config)
    yield from _layout_problems(config)
    yield from _batch_problems(config)


def _model_problems(config: ModelConfig) -> Iterator[str]:
    tp, heads = config.tensor_model_parallel_size, config.num_attention_heads
    groups, ffn = config.num_query_groups, config.ffn_hidden_size
    yield from indivisible("hidden size", config.hidden_size, "heads", heads, "--hidden-size")
    yield from indivisible(
        "number of heads", heads, "query groups", groups, "--num-attention-heads"
    )
    sizes = range(1, min(groups, _MOST_TP) + 1)
    fitting = [str(size) for size in sizes if not (heads % size | groups % size | ffn % size)]
    split = ("attention heads", heads), ("query groups", groups)
    wrong = [f"{count} {kind}" for kind, count in split if count % tp]
    if wrong:
        wrong += [f"a feed-forward width of {ffn}"] if ffn % tp else []
        yield (
            f"{', '.join(wrong)} are not divisible by TP {tp}; choose TP from {', '.join(fitting)}"
        )
    else:
        yield from indivisible("feed-forward width", ffn, "TP", tp, "--ffn-hidden-size")
    if config.max_position_embeddings < config.seq_length:
        yield (
            f"sequence length {config.seq_length} exceeds --max-position-embeddings "
            f"{config.max_position_embeddings}; raise the latter to {config.seq_length}"
        )


def _layout_problems(config: ModelConfig) -> Iterator[str]:
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    pp, algorithm = config.pipeline_model_parallel_size, config.context_parallel_algo
    if config.world_size % config.model_parallel_size:
        yield (
            f"{config.world_size} NPUs (NNODES {config.nnodes} x NPUS_PER_NODE "
            f"{config.npus_per_node}) are not divisible by TP*PP*CP = {tp}*{pp}*{cp} = "
            f"{config.model_parallel_size}; change NNODES or NPUS_PER_NODE, or choose TP, PP "
            f"and CP whose product divides {config.world_size}"
        )
    yield from _pipeline_problems(config)
    parts, by, heads = cp, "CP", config.num_attention_heads
    # If the heads do not fit TP, _model_problems reports it, and no sequence length would help.
    if config.uses_sequence_parallel and not (heads % tp or config.num_query_groups % tp):
        parts, by = tp * cp, f"TP*CP = {tp}*{cp} ="
    if cp > 1 and algorithm == "megatron_cp_algo" and config.seq_length % parts == 0:
        # Each rank gets a part from both ends of the causal triangle.
        parts, by = 2 * cp, f"2*CP = 2*{cp} ="
    yield from indivisible("sequence length", config.seq_length, by, parts, "--seq-length")
    if cp > 1 and algorithm == "ulysses_cp_algo" and heads % (tp * cp):
        yield (
            f"{heads} attention heads are not divisible by TP*CP = {tp}*{cp} = {tp * cp}, "
            "as ulysses_cp_algo needs; choose another CP or --context-parallel-algo"
        )


def _pipeline_problems(config: ModelConfig) -> Iterator[str]:
    pp, layers = config.pipeline_model_parallel_size, config.num_layer_list
    all_layers = config.num_layers
    if layers is None:
        if all_layers % pp:
            fitting = [str(n) for n in range(1, all_layers + 1) if all_layers % n == 0]
            yield (
                f"{all_layers} layers are not divisible by PP {pp}; choose PP from "
                f"{', '.join(fitting)}, or give the layers of each stage as NUM_LAYER_LIST"
            )
        return
    listed = ",".join(map(str, layers))
    if pp == 1:
        yield f"NUM_LAYER_LIST {listed} needs PP of at least 2; set NUM_LAYER_LIST=none"
    elif len(layers) != pp or sum(layers) != all_layers:
        yield (
            f"NUM_LAYER_LIST {listed} has {len(layers)} stages with {sum(layers)} layers, but "
            f"PP is {pp} and the model has {all_layers}; give {pp} numbers that add up to "
            f"{all_layers}, or NUM_LAYER_LIST=none for the same number in each"
        )


def _batch_problems(config: ModelConfig) -> Iterator[str]:
    micro, replicas = config.micro_batch_size, config.data_parallel_size
    if config.world_size % config.model_parallel_size == 0:
        by = f"micro-batch size times data-parallel size = {micro}*{replicas} ="
        yield from indivisible(
            "global batch size", config.global_batch_size, by, micro * replicas,
            "--global-batch-size",
        )  # fmt: skip
    if config.min_lr > config.lr:
        yield (
            f"--min-lr {config.min_lr} is above --lr {config.lr}; choose --min-lr of at most "
            f"{config.lr}"
        )


def indivisible(what: str, value: int, by: str, divisor: int, option: str = "") -> Iterator[str]:
    """The problem unless ``divisor`` divides ``value``, with the nearest values that fit."""
    if value % divisor:
        below = value // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else str(divisor)
        choose = " ".join(filter(None, ("choose", option, nearest)))
        yield f"{what} {value} is not divisible by {by} {divisor}; {choose}"
