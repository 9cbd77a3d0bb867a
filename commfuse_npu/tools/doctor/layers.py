"""What a launch would fuse: per layer the operator, its shapes and its transfers.

Reads options and sizes only.  What decides at run time are the wrappers around Megatron's layers
and its self-attention; this says the same beforehand, on any machine, in their words, and tests
hold the two against each other.

Legend: ``S`` rows of the sequence on this rank's context-parallel part, ``s`` its shard
(``S`` / TP), ``B`` micro-batch, ``H`` hidden, ``I`` input and ``O`` output features.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.tools.doctor.fuse_options import chunks_of, min_rows_of
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.linear_layers import attention_obstacle, judge

__all__ = [
    "ATTENTION_OPERATOR",
    "FusedLayer",
    "fused_layers",
]

ATTENTION_OPERATOR = "attention_linear_reduce_scatter"
"""What runs in place of ``proj`` where attention is fused with it."""

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
    transfers: int
    transfer_bytes: int
    longest: int


def fused_layers(launch: Launch) -> list[FusedLayer]:
    """What would happen to each linear layer, with ``--use-commfuse`` if it is not given.

    Args:
        launch: with a configuration that :meth:`~ModelConfig.validate` accepts.
    """
    config, fuse = launch.config, launch.fuse
    tp, hidden, ffn = config.tensor_model_parallel_size, config.hidden_size, config.ffn_hidden_size
    head = hidden // config.num_attention_heads
    features = {
        "qkv": (hidden, head * (config.num_attention_heads + 2 * config.num_query_groups)),
        "proj": (hidden, hidden),
        "fc1": (hidden, 2 * ffn),
        "fc2": (ffn, hidden),
        "output": (hidden, config.padded_vocab_size),
    }
    rows = config.seq_length // config.context_parallel_size
    batch = config.micro_batch_size
    sequence = config.uses_sequence_parallel
    shard = rows // tp if sequence else rows
    # What one rank has to give to, or gets from, each other: s*B rows of H numbers.
    block_rows = config.block_rows
    row_bytes = hidden * (2 if config.bf16 or "--fp16" in launch.options else 4)
    judged = {one.layer: one.reason for one in judge(launch.options, fuse.layers)}
    found = []
    for layer, (inputs, outputs) in features.items():
        if layer in _COLUMN_PARALLEL:
            operator = "all_gather_linear"
            shapes = ((shard, batch, inputs), (outputs // tp, inputs), (rows, batch, outputs // tp))
        else:
            operator = "linear_reduce_scatter" if sequence else "linear_all_reduce"
            shapes = ((rows, batch, inputs // tp), (outputs, inputs // tp), (shard, batch, outputs))
        reason = judged.get(layer, _ABSENT) or _too_few(launch)
        # Two halves: a reduce-scatter, and a gather of its result.
        halves = 2 if operator == "linear_all_reduce" else 1
        chunks = chunks_of(config, fuse)
        chunk_rows = -(-block_rows // chunks)
        if layer == "proj" and fuse.attention and not attention_obstacle(launch.options):
            # Queries are split, not rows of s*B: no chunk has less than one of them.
            operator, chunks = ATTENTION_OPERATOR, min(chunks, shard)
            chunk_rows = -(-shard // chunks) * batch
        if reason:
            found.append(FusedLayer(layer, None, reason, *shapes, 0, 0, 0))
        else:
            sent, largest = halves * (tp - 1) * chunks, chunk_rows * row_bytes
            longest = block_rows * row_bytes if layer in _COLUMN_PARALLEL else largest
            found.append(FusedLayer(layer, operator, "", *shapes, sent, largest, longest))
    return found


def _too_few(launch: Launch) -> str:
    """Why blocks keep Megatron's forward for their length; empty if they do not."""
    config = launch.config
    limit = min_rows_of(config.tensor_model_parallel_size, config.hidden_size, launch.fuse)
    if config.block_rows < limit:
        return f"a block has fewer rows than the {limit} of --commfuse-min-rows"
    return ""
