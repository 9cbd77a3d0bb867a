"""How large the HCCL buffers of the lanes are: ``--hccl-group-buffer "commfuse:64"``.

HCCL allocates twice its buffer size per communicator (200 MB by default), so lanes are worth
sizing.  MindSpeed's option names the groups by a fixed list and refuses any other name; the part
that is meant for the lanes is therefore taken out before MindSpeed reads it.  Lanes that are not
named get what MindSpeed gives the group that they are made for.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

__all__ = ["LANES", "lane_options", "take_lane_megabytes"]

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
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": megabytes}
    return options
