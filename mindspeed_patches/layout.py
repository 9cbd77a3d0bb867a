"""What the arguments of a launch, early or real, say about groups and the blocks of their ranks.

At patch time options that nobody typed are absent and values are strings.
"""

from __future__ import annotations

import argparse
from typing import Any

from commfuse_npu.plan import block_rows

__all__ = ["hidden_size", "parallel_size", "rows_of_blocks"]


def parallel_size(args: argparse.Namespace, kind: str) -> int:
    """Of a parallel dimension: ``tensor_model``, ``pipeline_model`` or ``context``."""
    return int(getattr(args, f"{kind}_parallel_size", None) or 1)


def hidden_size(args: argparse.Namespace) -> int | None:
    """Features of a row; ``None`` where the arguments do not say."""
    size = getattr(args, "hidden_size", None)
    return None if size is None else int(size)


def rows_of_blocks(args: argparse.Namespace) -> int | None:
    """Of tensor-parallel layers (:func:`~commfuse_npu.plan.block_rows`).

    ``None`` where the arguments do not say.
    """
    names = ("seq_length", "micro_batch_size")
    sizes: list[Any] = [getattr(args, name, None) for name in names]
    if None in sizes:
        return None
    groups = (parallel_size(args, kind) for kind in ("tensor_model", "context"))
    return block_rows(*map(int, sizes), *groups)
