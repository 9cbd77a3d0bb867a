"""Sizes of the lanes' HCCL buffers.

HCCL allocates twice its buffer size (200 MB by default) per communicator, so lanes are sized to
their messages, which saves memory.  If the arguments do not determine those, they get the buffer
size of the group that they connect, which ``--hccl-group-buffer`` sets.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

from commfuse_npu.options import given_options
from commfuse_npu.runtime.hccl_options import buffers_of, lane_megabytes
from mindspeed_patches.layout import (
    data_parallel_size,
    hidden_size,
    parallel_size,
    rows_of_blocks,
    schedule_here,
)

__all__ = ["lane_options", "of_blocks", "of_buckets", "of_heads"]


def of_blocks(args: argparse.Namespace) -> int | None:
    """HCCL buffer in MB with which a tensor-parallel lane carries its longest message at once.

    The message is a block of ``[seq_length / (TP * CP), micro_batch_size, hidden_size]``, which the
    backward of a column-parallel layer gathers; for a collective, the blocks of all ranks.
    ``None`` if the arguments do not determine it.
    """
    size = parallel_size(args, "tensor_model")
    schedule = schedule_here(given_options(args), size, linear=True)
    return _megabytes(args, 1, schedule.blocks_at_once(size))


def of_heads(args: argparse.Namespace) -> int | None:
    """:func:`of_blocks` for a context-parallel group, whose ranks exchange heads.

    The data are as large as a tensor-parallel block; each peer gets 1/CP of them.
    """
    return _megabytes(args, parallel_size(args, "context"))


def of_buckets(args: argparse.Namespace) -> int | None:
    """:func:`of_blocks` for a data-parallel group: a rank's shard of a gradient bucket in fp32.

    Megatron's buckets have ``--ddp-bucket-size`` parameters, by default the larger of 40 million
    and one million per rank (``DistributedDataParallelConfig`` of core 0.12).  ``None`` without
    ``--overlap-grad-reduce``, where one bucket has all parameters.
    """
    ranks = data_parallel_size(args)
    if ranks == 1 or not getattr(args, "overlap_grad_reduce", None):
        return None
    parameters = getattr(args, "ddp_bucket_size", None) or max(40_000_000, 1_000_000 * ranks)
    return lane_megabytes(4 * int(parameters) / ranks)


def _megabytes(args: argparse.Namespace, parts: int, blocks: int = 1) -> int | None:
    """The size of ``blocks`` blocks in one message, with the features divided by ``parts``."""
    rows, hidden = rows_of_blocks(args), hidden_size(args)
    if rows is None or hidden is None:
        return None
    item = 2 if getattr(args, "bf16", False) or getattr(args, "fp16", False) else 4
    return lane_megabytes(blocks * rows * -(-hidden // parts) * item)


def lane_options(group: dist.ProcessGroup, megabytes: int | None, name: str) -> Any:
    """``pg_options`` of lanes over ``group``, Megatron's ``name`` group; ``None`` without HCCL."""
    if "hccl" not in dist.get_backend(group):
        return None
    if megabytes is None:
        from megatron.core import parallel_state

        return parallel_state.get_nccl_options(name, {})
    return buffers_of(megabytes)
