"""Mismatches between a model, its parallel layout and its batch, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["indivisible", "problems"]

_MOST_RANKS = 4096
"""Largest size of a group that is suggested."""


def problems(config: ModelConfig) -> Iterator[str]:
    """All mismatches, each with the value, the limit and the remedy."""
    for row in _divisions(config):
        yield from indivisible(*row)
    if config.max_position_embeddings < config.seq_length:
        yield (
            f"sequence length {config.seq_length} exceeds --max-position-embeddings "
            f"{config.max_position_embeddings}; raise the latter to {config.seq_length}"
        )
    layers, pp = config.num_layer_list, config.pipeline_model_parallel_size
    if layers and (pp == 1 or len(layers) != pp or sum(layers) != config.num_layers):
        yield (
            f"NUM_LAYER_LIST {','.join(map(str, layers))} does not fit PP {pp} and "
            f"{config.num_layers} layers; give a number for each of 2 or more stages, of sum "
            f"{config.num_layers}, or NUM_LAYER_LIST=none for the same number in each"
        )


def _divisions(config: ModelConfig) -> Iterator[tuple[str, int, str, int, str]]:
    """Arguments of :func:`indivisible`."""
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    pp, algorithm = config.pipeline_model_parallel_size, config.context_parallel_algo
    heads, groups = config.num_attention_heads, config.num_query_groups
    ffn = config.ffn_hidden_size
    yield "hidden size", config.hidden_size, "heads", heads, "--hidden-size"
    yield "number of heads", heads, "query groups", groups, "--num-attention-heads"
    heads_fit = not (heads % tp or groups % tp)
    if heads_fit:
        yield "feed-forward width", ffn, "TP", tp, "--ffn-hidden-size"
    else:
        sizes = f"{heads} attention heads, {groups} query groups and feed-forward width {ffn}"
        yield f"{sizes}: their common divisor", gcd(heads, groups, ffn), "TP", tp, "TP"
    if config.num_layer_list is None:
        layers = "without NUM_LAYER_LIST the number of layers"
        yield layers, config.num_layers, "PP", pp, "PP"
    product, change = f"TP*PP*CP = {tp}*{pp}*{cp} =", "another layout, or NNODES * NPUS_PER_NODE"
    yield "number of NPUs", config.world_size, product, config.model_parallel_size, change
    parts, by = cp, "CP"
    # If the heads do not fit TP, no sequence length would help.
    if config.uses_sequence_parallel and heads_fit:
        parts, by = tp * cp, f"TP*CP = {tp}*{cp} ="
    if cp > 1 and algorithm == "megatron_cp_algo" and config.seq_length % parts == 0:
        # Each rank gets a part from both ends of the causal triangle.
        parts, by = 2 * cp, f"2*CP = 2*{cp} ="
    yield "sequence length", config.seq_length, by, parts, "--seq-length"
    if cp > 1 and algorithm == "ulysses_cp_algo" and heads_fit:
        yield "for Ulysses the number of attention heads per TP rank", heads // tp, "CP", cp, "CP"
    if config.world_size % config.model_parallel_size == 0:
        micro, replicas = config.micro_batch_size, config.data_parallel_size
        by = f"micro-batch size times data-parallel size = {micro}*{replicas} ="
        batch = config.global_batch_size
        yield "global batch size", batch, by, micro * replicas, "--global-batch-size"


def indivisible(what: str, value: int, by: str, divisor: int, option: str = "") -> Iterator[str]:
    """The problem unless ``divisor`` divides ``value``, with the nearest values that fit.

    Args:
        option: what to change: an option that sets the value, or ``by``, to change the divisor.
    """
    if value % divisor == 0:
        return
    below = value // divisor * divisor
    fitting = [below, below + divisor] if below else [divisor]
    if option == by:
        sizes = [n for n in range(1, min(value, _MOST_RANKS) + 1) if value % n == 0]
        smaller = [n for n in sizes if n < divisor]
        fitting = [*smaller[-1:], *sizes[len(smaller) :][:1]]
    choose = " ".join(filter(None, ("choose", option, " or ".join(map(str, fitting)))))
    yield f"{what} {value} is not divisible by {by} {divisor}; {choose}"
