"""How large the HCCL buffers of the lanes are: ``--hccl-group-buffer "commfuse:64"``.

HCCL allocates twice its buffer size per communicator (200 MB by default), so lanes are worth
sizing.  MindSpeed's option names the groups by a fixed list and refuses any other name; the part
that is meant for the lanes is therefore taken out before MindSpeed reads it.  Lanes of
tensor-parallel groups are sized to their messages if the option is not given at all; others that
are not named get what MindSpeed gives the group that they are made for.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

from commfuse_npu.runtime.hccl_options import buffers_of
from mindspeed_patches.layout import rows_of_blocks

__all__ = ["LANES", "lane_options", "message_megabytes", "take_lane_megabytes"]

LANES = "commfuse"
"""The name of the lanes in ``--hccl-group-buffer``."""


def take_lane_megabytes(args: argparse.Namespace) -> int | None:
    """The size in MB for the lanes, taken out of ``args.hccl_group_buffer``.

    Raises:
        ValueError: the size is not a whole number from 1.
    """
    given = getattr(args, "hccl_group_buffer", None)
    if not given:
        return None
    # MindSpeed separates by semicolons, its newer versions by commas too.
    separator = "," if "," in given else ";"
    kept, megabytes = [], None
    for part in given.split(separator):
        name, _, size = part.partition(":")
        if name.strip() != LANES:
            kept.append(part)
            continue
        if not size.strip().isdecimal() or int(size) < 1:
            raise ValueError(
                f"--hccl-group-buffer {part.strip()}: the size is in MB, a whole number from 1, "
                f"as in {LANES}:64"
            )
        megabytes = int(size)
    args.hccl_group_buffer = separator.join(kept) or None
    return megabytes


_LEAST_MEGABYTES, _MOST_MEGABYTES = 16, 200


def message_megabytes(args: argparse.Namespace) -> int | None:
    """What a lane of a tensor-parallel group needs to carry its longest message at once, in MB.

    A block of ``[seq_length / (TP * CP), micro_batch_size, hidden_size]``, which the backward of a
    column-parallel layer gathers whole, rounded up to a power of two and not below 16; no more than
    HCCL's own 200, in which longer messages go in rounds.
    ``None`` where the arguments do not say.
    """
    rows, hidden = rows_of_blocks(args), getattr(args, "hidden_size", None)
    if rows is None or hidden is None:
        return None
    item = 2 if getattr(args, "bf16", False) or getattr(args, "fp16", False) else 4
    megabytes = -(-rows * hidden * item // 2**20)
    return min(_MOST_MEGABYTES, max(_LEAST_MEGABYTES, 1 << (megabytes - 1).bit_length()))


def lane_options(group: dist.ProcessGroup, megabytes: int | None, name: str = "tp") -> Any:
    """``pg_options`` for lanes over ``group``; only HCCL has any.

    Args:
        name: what Megatron calls the group.
    """
    if "hccl" not in dist.get_backend(group):
        return None
    if megabytes is None:
        from megatron.core import parallel_state

        return parallel_state.get_nccl_options(name, {})
    return buffers_of(megabytes)
