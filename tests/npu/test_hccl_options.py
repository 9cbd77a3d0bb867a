"""Options of lanes, as torch_npu's own class takes them."""

from __future__ import annotations

from commfuse_npu.runtime.hccl_options import buffers_of


def buffer_size(megabytes: int) -> object:
    """In the worker."""
    return buffers_of(megabytes).hccl_config


def test_the_size_of_buffers_is_torch_npus_own_option(npu) -> None:
    assert npu.run(buffer_size, 20) == {"hccl_buffer_size": 20}
