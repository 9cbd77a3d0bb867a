"""Calls of the kernels and the streams against the wheel's schemas and meta kernels."""

import inspect
from typing import Any

import pytest
import torch

from commfuse_npu.kernels import AttentionPiece
from commfuse_npu.kernels import npu as kernels
from commfuse_npu.runtime.hccl_options import buffers_of


def shapes_on_meta(mask: str, dtype: torch.dtype) -> None:
    """In the worker: runs the kernels on tensors without data.

    torch_npu's schemas check the arguments, its meta kernels give the shapes of the results.
    """
    from torch_npu.op_plugin.meta import _meta_registrations

    # A warning for Ascend 950 is printed once; it would query the device, which is absent.
    _meta_registrations._npu_fusion_attention_warning_printed = True
    forward = inspect.getsource(_meta_registrations.npu_fusion_attention_forward)
    knows_documents = "TND" in forward
    q, grad = torch.empty(2, 6, 3, 4, 32, device="meta", dtype=dtype)
    k, v = torch.empty(2, 9, 3, 2, 32, device="meta", dtype=dtype)
    options: dict[str, Any] = {"causal": mask != "full"}
    if mask == "documents":
        options["pieces"] = [
            AttentionPiece(sample, slice(0, 6), slice(sample, 9)) for sample in range(3)
        ]
    rows = (18, 4, 8) if mask == "documents" else (3, 4, 6, 8)
    out, statistics = kernels.attention_forward(q, k, v, **options)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    maximum, total, reserved = statistics
    for value in (maximum, total):
        assert value.dtype == torch.float32
        # The meta kernel of 2.7.1 gives statistics of BNSD for TND as well.
        assert tuple(value.shape) == rows or (mask == "documents" and not knows_documents)
    assert reserved.shape == (0,)
    sums = [torch.empty(k.shape, device="meta") for _ in range(2)]
    grad_q = kernels.attention_backward(grad, q, k, v, out, statistics, *sums, **options)
    assert (grad_q.shape, grad_q.dtype, grad_q.device) == (q.shape, dtype, q.device)


@pytest.mark.parametrize("mask", ["causal", "full", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_calls_fit_their_schemas_and_meta_kernels(npu, mask: str, dtype: torch.dtype) -> None:
    npu.run(shapes_on_meta, mask, dtype)


def buffer_size(megabytes: int) -> object:
    """In the worker: options of lanes, as torch_npu's own class takes them."""
    return buffers_of(megabytes).hccl_config


def test_the_size_of_buffers_is_torch_npus_own_option(npu) -> None:
    assert npu.run(buffer_size, 20) == {"hccl_buffer_size": 20}
