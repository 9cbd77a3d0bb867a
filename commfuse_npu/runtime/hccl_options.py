"""Options of a communicator of HCCL."""

from __future__ import annotations

from typing import Any

__all__ = ["buffers_of", "lane_megabytes"]

_LEAST_MEGABYTES, _MOST_MEGABYTES = 16, 200


def lane_megabytes(message: float) -> int:
    """The buffer, in MB, of a lane whose longest message has so many bytes.

    Rounded up to a power of two and not below 16; no more than HCCL's own 200, in which longer
    messages go in rounds.  HCCL allocates it twice.
    """
    megabytes = max(1, -(-int(message) // 2**20))
    return min(_MOST_MEGABYTES, max(_LEAST_MEGABYTES, 1 << (megabytes - 1).bit_length()))


def buffers_of(megabytes: int) -> Any:
    """``pg_options`` of a group whose communicator has two buffers of so many MB.

    HCCL's own size is that of ``HCCL_BUFFSIZE``, 200 unless it is set.  Only for the backend
    ``hccl``: torch_npu has to be there.
    """
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": megabytes}
    return options
