"""What a launch would fuse: per layer the operator, its shapes and its transfers.

Reads options and sizes only.  What decides at run time are the wrappers around Megatron's layers;
this says the same beforehand, on any machine, and tests hold the two against each other.

Legend: ``S`` rows of the sequence on this rank's context-parallel part, ``s`` its shard
(``S`` / TP), ``B`` micro-batch, ``H`` hidden, ``I`` input and ``O`` output features.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.tools.doctor.attention import attention_obstacle
from commfuse_npu.tools.doctor.fuse_options import FuseOptions
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["ATTENTION_OPERATOR", "FusedLayer", "fused_layers"]

ATTENTION_OPERATOR = "attention_linear_reduce_scatter"
"""What runs in place of ``proj`` where attention is fused with it."""


@dataclass(frozen=True)
class FusedLayer:
    """One of the five linear layers of a Llama.

    Attributes:
        layer: Megatron's name of it.
        operator: what runs in the forward, or ``None`` for Megatron's own forward.
        reason: why Megatron's own forward, or empty.
        input_shape, weight_shape, output_shape: on one rank.
        transfers: messages that a rank sends in the forward.
        transfer_bytes: of the largest of them.
    """

    layer: str
    operator: str | None
    reason: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    transfers: int
    transfer_bytes: int


def fused_layers(
    config: ModelConfig,
    options: FuseOptions,
    *,
    element_bytes: int = 2,
    experts: bool = False,
    recomputed_attention: bool = False,
) -> list[FusedLayer]:
    """What would happen to each linear layer.

    Args:
        config: a configuration that :meth:`~ModelConfig.validate` accepts.
        element_bytes: of an activation: 2 in bf16 and fp16.
        experts: whether the feed-forward layers are mixtures of experts.
        recomputed_attention: whether the core attention is recomputed by itself.
    """
    tp, hidden = config.tensor_model_parallel_size, config.hidden_size
    head = hidden // config.num_attention_heads
    features = {
        "qkv": (hidden, head * (config.num_attention_heads + 2 * config.num_query_groups)),
        "proj": (hidden, hidden),
        "fc1": (hidden, 2 * config.ffn_hidden_size),
        "fc2": (config.ffn_hidden_size, hidden),
        "output": (hidden, config.padded_vocab_size),
    }
    rows = config.seq_length // config.context_parallel_size
    batch = config.micro_batch_size
    sequence = config.uses_sequence_parallel
    shard = rows // tp if sequence else rows
    # What one rank has to give to, or gets from, each other: s*B rows of H numbers.
    block_rows = rows * batch // tp
    row_bytes = hidden * element_bytes
    takes_attention = options.attention and not attention_obstacle(config, recomputed_attention)
    found = []
    for layer, (inputs, outputs) in features.items():
        column = layer in ("qkv", "fc1", "output")
        if column:
            operator = "all_gather_linear"
            shapes = ((shard, batch, inputs), (outputs // tp, inputs), (rows, batch, outputs // tp))
        else:
            operator = "linear_reduce_scatter" if sequence else "linear_all_reduce"
            shapes = ((rows, batch, inputs // tp), (outputs, inputs // tp), (shard, batch, outputs))
        reason = _obstacle(layer, config, options, block_rows * row_bytes, experts)
        # Two halves: a reduce-scatter, and a gather of its result.
        halves = 2 if operator == "linear_all_reduce" else 1
        chunks, chunk_rows = options.chunks, -(-block_rows // options.chunks)
        if layer == "proj" and takes_attention:
            # Queries are split, not rows of s*B: no chunk has less than one of them.
            operator, chunks = ATTENTION_OPERATOR, min(chunks, shard)
            chunk_rows = -(-shard // chunks) * batch
        sent = 0 if reason else halves * (tp - 1) * chunks
        found.append(
            FusedLayer(
                layer,
                None if reason else operator,
                reason,
                *shapes,
                sent,
                chunk_rows * row_bytes if sent else 0,
            )
        )
    return found


def _obstacle(
    layer: str, config: ModelConfig, options: FuseOptions, block_bytes: int, experts: bool
) -> str:
    """Why Megatron's forward stays, in the words of the wrappers; empty if it does not."""
    if not options.use_commfuse:
        return "--use-commfuse is not given"
    if layer in ("qkv", "fc1", "output") and not config.uses_sequence_parallel:
        return "without sequence parallelism the forward has no transfer"
    if layer not in options.layers:
        return f"{layer} is not in the list of layers to fuse"
    if experts and layer in ("fc1", "fc2"):
        return "expert layers communicate by their own rules"
    if config.tensor_model_parallel_size == 1:
        return "a tensor-parallel group of one has nothing to transfer"
    limit = 1024 * options.min_kib
    if block_bytes < limit:
        return f"a block of {block_bytes} bytes is smaller than the limit of {limit}"
    return ""
