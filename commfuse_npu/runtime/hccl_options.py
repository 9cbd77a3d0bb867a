"""Options of a communicator of HCCL."""

from __future__ import annotations

from typing import Any

__all__ = ["buffers_of"]


def buffers_of(megabytes: int) -> Any:
    """``pg_options`` of a group whose communicator has two buffers of so many MB.

    HCCL's own size is that of ``HCCL_BUFFSIZE``, 200 unless it is set.  Only for the backend
    ``hccl``: torch_npu has to be there.
    """
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": megabytes}
    return options
