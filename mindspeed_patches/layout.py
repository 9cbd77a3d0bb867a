"""Parallel sizes and block shapes from the arguments of a launch, before or after validation.

At patch time, options that are not on the command line are absent and values are strings.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from commfuse_npu.options import schedule_for
from commfuse_npu.plan import Schedule, block_rows

__all__ = [
    "data_parallel_size",
    "hidden_size",
    "parallel_size",
    "rows_of_blocks",
    "schedule_here",
]


def parallel_size(args: argparse.Namespace, kind: str) -> int:
    """The size of a parallel dimension: ``tensor_model``, ``pipeline_model`` or ``context``."""
    return int(getattr(args, f"{kind}_parallel_size", None) or 1)


def data_parallel_size(args: argparse.Namespace) -> int:
    """The number of ranks that share parameters, context-parallel ranks included."""
    # Before validation only the launcher's environment has the size of the job.
    world = int(getattr(args, "world_size", None) or os.environ.get("WORLD_SIZE") or 1)
    model_parallel = parallel_size(args, "tensor_model") * parallel_size(args, "pipeline_model")
    return max(1, world // model_parallel)


def hidden_size(args: argparse.Namespace) -> int | None:
    """Features of a row; ``None`` if the arguments do not give them."""
    size = getattr(args, "hidden_size", None)
    return None if size is None else int(size)


def rows_of_blocks(args: argparse.Namespace) -> int | None:
    """Rows of a block in tensor-parallel layers (:func:`~commfuse_npu.plan.block_rows`).

    ``None`` if the arguments do not determine them.
    """
    sizes: list[Any] = [getattr(args, name, None) for name in ("seq_length", "micro_batch_size")]
    if None in sizes:
        return None
    groups = (parallel_size(args, kind) for kind in ("tensor_model", "context"))
    return block_rows(*map(int, sizes), *groups)


def schedule_here(
    options: argparse.Namespace, size: int, stride: int = 1, **usual: Any
) -> Schedule:
    """:func:`~commfuse_npu.options.schedule_for` with the processes per node of this job.

    Args:
        options: typed options.
        size, stride: ranks of the group, and the distance between their global ranks.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", size * stride))
    return schedule_for(options, size, processes, stride, **usual)
