"""What a launch would fuse: per layer of a Llama the operator, its shapes and its transfers.

It reads options and sizes only.  At run time the wrappers around Megatron's layers and its
self-attention decide; a test compares the two.

Legend: ``S`` rows of the sequence on this rank's context-parallel part, ``s`` its shard
(``S`` / TP), ``B`` micro-batch, ``H`` hidden, ``I`` input and ``O`` output features.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.linear_layers import attention_obstacle

__all__ = ["ATTENTION_OPERATOR", "LLAMA_LAYERS", "FusedLayer", "fused_layers"]

ATTENTION_OPERATOR = "attention_linear_reduce_scatter"
"""What runs in place of ``proj`` where attention is fused with it."""

LLAMA_LAYERS = ("qkv", "proj", "fc1", "fc2", "output")
"""The layers whose shapes are known here."""

_COLUMN_PARALLEL = ("qkv", "fc1", "output")
_ABSENT = "this model has experts or other layers in its place"


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
        longest: bytes of the longest message, the backward's included: a column-parallel layer
            gathers its input again in whole blocks.
    """

    layer: str
    operator: str | None
    reason: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    transfers: int = 0
    transfer_bytes: int = 0
    longest: int = 0


def fused_layers(launch: Launch) -> list[FusedLayer]:
    """What would happen to each linear layer, with ``--use-commfuse`` if it is not given.

    Args:
        launch: with a configuration that :meth:`~ModelConfig.validate` accepts, and a schedule.
    """
    config = launch.config
    tp, hidden, ffn = config.tensor_model_parallel_size, config.hidden_size, config.ffn_hidden_size
    head = hidden // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_query_groups
    features = (
        *((hidden, head * heads), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden)),
        (hidden, config.padded_vocab_size),
    )
    rows, batch = config.seq_length // config.context_parallel_size, config.micro_batch_size
    sequence = config.uses_sequence_parallel
    shard = rows // tp if sequence else rows
    # What one rank has to give to, or gets from, each other: s*B rows of H numbers.
    block_rows, limit = config.block_rows, launch.least_rows
    row_bytes = hidden * (2 if config.bf16 or "--fp16" in launch.options else 4)
    judged = {one.layer: one.reason for one in launch.judged.layers}
    short = f"a block has fewer rows than the {limit} of --commfuse-min-rows"
    found = []
    for layer, (inputs, outputs) in zip(LLAMA_LAYERS, features, strict=True):
        column, chunks = layer in _COLUMN_PARALLEL, launch.schedule.chunks
        if column:
            operator = "all_gather_linear"
            shapes = ((shard, batch, inputs), (outputs // tp, inputs), (rows, batch, outputs // tp))
        else:
            operator = "linear_reduce_scatter" if sequence else "linear_all_reduce"
            shapes = ((rows, batch, inputs // tp), (outputs, inputs // tp), (shard, batch, outputs))
        reason = judged.get(layer, _ABSENT) or (short if block_rows < limit else "")
        chunk_rows = -(-block_rows // chunks)
        fuses_attention = launch.fuse.commfuse_attention and layer == "proj"
        if fuses_attention and not attention_obstacle(launch.options):
            # Queries are split, not rows of s*B: no chunk has less than one of them.
            operator, chunks = ATTENTION_OPERATOR, min(chunks, shard)
            chunk_rows = -(-shard // chunks) * batch
        if reason:
            found.append(FusedLayer(layer, None, reason, *shapes))
            continue
        # Two halves: a reduce-scatter, and a gather of its result.
        halves = 2 if operator == "linear_all_reduce" else 1
        sent, largest = halves * (tp - 1) * chunks, chunk_rows * row_bytes
        longest = block_rows * row_bytes if column else largest
        found.append(FusedLayer(layer, operator, "", *shapes, sent, largest, longest))
    return found
