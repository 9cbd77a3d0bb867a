"""Options of HCCL communicators."""

from __future__ import annotations

from typing import Any

__all__ = ["buffers_of", "lane_megabytes"]

_LEAST_MEGABYTES = 16
_MOST_MEGABYTES = 200


def lane_megabytes(message: float) -> int:
    """The buffer size, in MB, of a lane whose longest message has ``message`` bytes.

    A power of two from 16 up, and at most 200, HCCL's default: longer messages are sent in several
    rounds.  HCCL allocates two buffers of this size.
    """
    megabytes = max(1, -(-int(message) // 2**20))
    return min(_MOST_MEGABYTES, max(_LEAST_MEGABYTES, 1 << (megabytes - 1).bit_length()))


def buffers_of(megabytes: int) -> Any:
    """``pg_options`` of a group whose communicator has two buffers of ``megabytes`` MB each.

    HCCL's default is ``HCCL_BUFFSIZE``, or 200 if that is not set.  Only for the backend ``hccl``;
    needs torch_npu.
    """
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": megabytes}
    return options
